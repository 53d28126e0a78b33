"""The simulator of ordered subjects: producers, broker groups, metaservers, consumers and etcd in
one thread, on one clock, under one seed.

It runs nearly only product code: brokers with their stores on real (small) files, metaservers,
clients with their connections. Each process has its own event loop on the world's clock (`loop`),
so the simulator can pause, skew and kill it between any two of its steps. The network of `loop` and
the etcd of `servers` are the environment with its faults. Only replication is a model (`servers`):
a master's entries are committed after a delay if there is a majority; at a failover the next master
opens the old log, cut at a random place after the committed entries.

`checks` reads the committed entries, and compares with them what producers and consumers were told.
`nemesis` draws the faults, `run` runs a seed, `bugs` has the planted bugs. `tracer` records what
happens, for TLC.
"""
