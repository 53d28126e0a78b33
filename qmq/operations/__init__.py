"""Looking after a cluster from a client: `qmq doctor`, `qmq top` and the console show what is here (docs/OPERATIONS.md).

cluster_snapshot    the whole cluster at one moment, as values
snapshot_reading    reads one over the public admin API
snapshot_parsing    what metaservers answer, as those values; pure
finding             something unusual, how severe it is, why it matters, and the next command
findings            what is unusual in a snapshot; pure
"""
