"""The coordination store on etcd v3, by a thin asyncio client of QMQ on grpcio.

    from qmq_coordination.etcd.store import EtcdStore

    values     our values as etcd's messages, and back (pure)
    channel    connections: the members' addresses, TLS, deadline, `hasleader`, the user's token
    calls      a call over all endpoints: what a failure proves, what may be retried, and until when
    watch      a watch that continues when its endpoint fails
    store      EtcdStore, and etcd's own users, by certificate

Why not a published client: the package `etcd3` 0.12.0 cannot be imported next to protobuf 4 or
later, and none of its relatives continues a watch over a killed or stopped node without losing
events or hanging. This client works with etcd 3.4 and later.
"""
