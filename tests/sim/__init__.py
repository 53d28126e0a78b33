"""The simulator: whole broker groups in one thread, on a virtual clock, under one seed.

`world` has the clock and the events, `network`, `disk` and `store` the environment with its faults, `node` runs the real replication core
and the real coordinator on them, `checks` looks after every event, `plan` draws the faults, `run` puts a seed together, `bugs` are the
planted ones.
"""
