"""The metaserver's part of ordered subjects (docs/ORDERING.md).

Decisions, by compare-and-swap. These modules await only the store, the brokers, and the clock and
timers that they are given:

    changes       a route change, from its request to done: every step is one transaction, which any
                  metaserver may do
    rounds        a round of a consumer group: it advances, and its lanes are assigned
    placement     where a group begins, moving it, and deleting it
    groups        a group's record, its subject's routes, and its members, as the store has them;
                  where a group starts

The modules that drive them, and that describe them:

    controller    when rounds run and changes continue, and which metaserver leads
    resharding    route changes by load, and away from lost broker groups
    service       all of it, as qmq/meta/service.py calls it; routes, partitions and groups for
                  people
"""
