"""The state of a cluster, read from a client: the data of `qmq doctor`, `qmq top` and the console
(docs/OPERATIONS.md).

snapshot           the whole cluster at one moment, as values, and the metaservers' answers as those
                   values; pure
snapshot_reading   reads one over the public admin API; rates from two of them
text               how values are written; what a finding is: its severity, why it matters, and the
                   next command
findings           finds the unusual states in a snapshot; pure
"""
