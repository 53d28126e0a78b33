"""Replication: Raft's rules for the log, etcd's word for who may be master.

`core` is the pure state machine; `messages` what replicas say to each other, `history` which epoch wrote which entries, `membership` who
counts, `progress` how far each peer is. `coordinator` does what the core asks of etcd. docs/REPLICATION.md says what must be true and why
it holds; the same core runs in the simulator (tests/sim) and under the driver.
"""
