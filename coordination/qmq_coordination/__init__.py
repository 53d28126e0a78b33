"""Coordination: small state on which all processes must agree, behind one interface with etcd's
semantics.

`coordination_store` is the interface, `embedded` the implementation for one node, on SQLite, `etcd`
the one for clusters. `view` keeps all keys in memory. The other modules define records: `subjects`,
`broker_groups`, `ordered_records`, `access_records`.
"""
