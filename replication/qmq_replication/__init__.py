"""Replication: Raft's rules for the log; a master is elected by winning an epoch in etcd.

`core` is the pure state machine; `replica_messages` has the messages, `history` which epoch wrote which entries, `replica_membership` the
members, `leader` and `election` the roles. `coordinator` does what the core asks of etcd, `driver` carries everything out.
docs/REPLICATION.md says what must be true and why it holds; the same core runs in the simulator (tests/sim) and under the driver.
"""
