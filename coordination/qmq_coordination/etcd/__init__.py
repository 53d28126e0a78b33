"""The coordination store on etcd v3, by a thin asyncio client of our own on grpcio.

    from qmq_coordination.etcd.etcd_store import EtcdStore

    endpoints   what the user wrote, as addresses; which of them is asked next        (pure)
    failures    what a failed call proves: refused, not done, or unknown              (pure)
    convert     our values as etcd's messages and back                                (pure)
    methods     the RPCs by path, with the types of their messages
    channel     one connection: TLS, deadline, `hasleader`, the user's token
    calls       a call over all endpoints: what may be retried, and until when
    watch       the watch that survives its endpoint
    users       etcd's own users, by certificate
    client      EtcdStore
    server      find and run an etcd; for development and tests

Why not a published client: PyPI's `etcd3` 0.12.0 cannot be imported next to protobuf 4 or later, and none of its relatives keeps a watch
over a killed or stopped node without losing events or hanging. This client speaks the same API, etcd v3, and needs nothing newer than 3.4.
"""
