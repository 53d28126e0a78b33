"""The state of a cluster, read from a client: the data of `qmq doctor`, `qmq top` and the console (docs/OPERATIONS.md).

cluster_snapshot    the whole cluster at one moment, as values
snapshot_reading    reads one over the public admin API
snapshot_parsing    converts the metaservers' answers to those values; pure
finding             an unusual state: its severity, why it matters, and the next command
findings            finds the unusual states in a snapshot; pure
"""
