"""Replication: Raft's rules for the log; a master is elected by winning an epoch in etcd.

`core` is the pure state machine; `ready` has its instructions and messages, `history` the epochs of
entries, `membership` the members, `leader` and `election` the roles. `coordinator` carries out the
core's requests to etcd, `driver` everything else. docs/REPLICATION.md says what must be true and
why it holds. The same core runs in the simulator (tests/sim) and under the driver.
"""
