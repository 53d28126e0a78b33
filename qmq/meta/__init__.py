"""The metaserver: locates subjects, and administers the cluster. A metaserver is stateless (the
state is in the coordination store), so run two or more.

    catalog        subjects, their groups and schemas, modes: read from memory, changed by
                   compare-and-swap
    ordered/       ordered subjects: route changes, consumer groups, lanes
    calls          calls to masters, replicas, partitions and delay groups, with deadlines; where
                   one message is, and its trail
    description    the whole cluster, for operators; routes, lanes and changes as protobuf messages
    watchers       pushes changes to clients
    delivery       group settings and pauses
    access         rules, roles, tokens, quotas; access control that follows them
    deletion       deleting subjects and dead-letter queues
    service        the gRPC service of meta.proto
    server         a metaserver that listens

A metaserver answers from the view (qmq_coordination.view). If it crashes, clients use the next
metaserver, and nothing is lost.
"""
