"""The simulator of replication: whole broker groups in one thread, on a virtual clock, under one
seed.

`world` has the clock, the events, and the environment with its faults: networks, disks and etcd;
`node` runs the real replication core and the real coordinator on them; `nemesis` draws the faults;
`run` runs a seed, and checks after every event; `bugs` has the planted bugs.
"""
