"""The metaserver's part of ordered subjects (docs/ORDERING.md).

Decisions, by compare-and-swap. These modules await only the store, the brokers, and the clock and timers that they are given:

    changes               a route change, from prepared to done: every step is one transaction, which any metaserver may do
    sealing               closing a source: its master seals it, or the store fences it
    group_rounds          a round of a consumer group: it advances, and its lanes are assigned
    group_placement       where a group begins, and moving it; `group_starts` has the data
    group_deletion        deleting a group
    group_records         a group's record and its subject's routes, as the store has them
    lane_progress         the brokers' answers about lanes, for the pure functions
    group_members         the members of a group: keys under leases, kept while a consumer polls

The modules that drive them, and that describe them:

    controller            when rounds run and changes continue; `controller_election` elects the leader
    auto_reshard          route changes by load
    change_plans          makes a change from a request
    evacuation            moves partitions away from lost broker groups
    route_description     routes, partitions and groups for people
    ordered_service       all of it, as qmq/meta/service.py calls it
"""
