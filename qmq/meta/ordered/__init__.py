"""The metaserver's side of ordered subjects (docs/ORDERING.md).

What decides, by compare-and-swap. These await nothing but the store, the brokers, and the clock and timers that they are given:

    changes      a change of a route, from prepared to done: every step one transaction, whoever takes it
    sealing      closing a source: its master seals it, or the store fences it
    groups       a round of a consumer group: it advances, and its lanes are dealt out
    placing      where a group begins, how it is moved; `starts` has the words for it
    forgetting   deleting a group
    records      a group's record and its subject's routes, as the store has them
    progress     what brokers say of a group's lanes, as the pure functions ask for it
    members      who is in a group: keys under leases, kept while a consumer asks

What drives and tells:

    controller   when rounds are run, and changes carried on; `leader` looks after what stands still
    reshard      changing routes by load, without being asked
    plans        what is asked for, made into a change
    describe     routes, partitions and groups for people
    asking       brokers over gRPC
    service      all of it, as qmq/meta/meta_service.py calls it
"""
