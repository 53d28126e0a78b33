"""The simulator of replication: whole broker groups in one thread, on a virtual clock, under one seed.

`world` has the clock and the events; `network`, `disk` and `store` are the environment with its faults; `node` runs the real replication
core and the real coordinator on them; `checks` checks after every event; `plan` draws the faults; `run` runs a seed; `bugs` has the
planted bugs.
"""
