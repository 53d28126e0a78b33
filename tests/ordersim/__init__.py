"""The simulator of ordered subjects: producers, broker groups, metaservers, consumers and etcd in one thread, on one clock, under one seed.

Nearly everything is the product itself: brokers with their stores on real (small) files, metaservers, clients with their connections. Each
process has an event loop of its own on the world's clock (`loop`), so it can be paused, skewed and killed between any two of its steps.
`network` and `etcd` are the environment with its faults. Replication alone is modelled (`broker`): a master's entries are committed after a
while if a majority is there; a failover is the log of before, cut somewhere behind what was committed, opened by the next master.

`ledger` reads what was committed, and `checks` compares what everybody was told with it; `nemesis` and `plan` draw the faults, `run` puts a
seed together, `story` tells one, `bugs` are the planted ones.
"""
