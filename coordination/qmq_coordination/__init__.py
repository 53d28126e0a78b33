"""Coordination: small state that everybody must agree on, behind one interface with etcd's semantics.

`store` is the interface, `embedded` the implementation for one node, on SQLite. On top: `subjects` (which subjects exist) and `registry`
(which brokers are there).
"""
