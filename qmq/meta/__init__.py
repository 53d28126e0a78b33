"""The metaserver: says where things are, and administers. Stateless: what it knows is in the coordination store, so run two or more.

    placement   on which broker groups a subject lives                       (pure)
    cluster     subjects, routes, modes: answered from memory, changed by compare-and-swap
    ordered     ordered subjects: changes of routes, consumer groups, who reads what (a package of its own)
    brokers     asking masters and replicas, with deadlines
    describe    the whole cluster for an operator's eyes
    watchers    telling clients at once what to locate anew
    convert     subjects as protobuf
    service     all of it as the gRPC service of meta.proto
    server      a metaserver that listens

What it answers from is qmq_coordination.view; if it crashes, clients go to the next one, and nothing is lost.
"""
