"""The metaserver: locates subjects, and administers the cluster. A metaserver is stateless (the state is in the coordination store), so run
two or more.

    placement               which broker groups a new subject gets                              pure
    cluster_catalog         subjects, routes, modes: read from memory, changed by compare-and-swap
    ordered/                ordered subjects: route changes, consumer groups, lanes
    broker_calls            calls to masters, replicas and partitions, with deadlines
    cluster_description     the whole cluster, for operators
    route_watchers          pushes changes to clients
    messages_of             routes, lanes and changes as protobuf messages
    delivery_admin          group settings and pauses
    access_service          rules, roles, tokens, quotas
    deletion                deleting subjects and dead-letter queues
    meta_service            the gRPC service of meta.proto
    meta_server             a metaserver that listens

A metaserver answers from the view (qmq_coordination.view). If it crashes, clients use the next metaserver, and nothing is lost.
"""
