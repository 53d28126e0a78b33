"""The coordination store on etcd v3, by a thin asyncio client of QMQ on grpcio.

    from qmq_coordination.etcd.store import EtcdStore

    endpoints       addresses of the members, and which of them is asked next              (pure)
    failures        what a failed call proves: refused, not done, or unknown               (pure)
    etcd_values     our values as etcd's messages, and back                                (pure)
    etcd_methods    the RPCs by path, with the types of their messages
    etcd_channel    one connection: TLS, deadline, `hasleader`, the user's token
    etcd_calls      a call over all endpoints: what may be retried, and until when
    watch           a watch that continues when its endpoint fails
    etcd_users      etcd's own users, by certificate
    etcd_store      EtcdStore
    etcd_process    finds and runs an etcd, for development and tests

Why not a published client: the package `etcd3` 0.12.0 cannot be imported next to protobuf 4 or later, and none of its relatives continues a
watch over a killed or stopped node without losing events or hanging. This client works with etcd 3.4 and later.
"""
