"""The campaign: workloads and faults on real processes, judged by what the contract says.

    scripts/campaign --list
    scripts/campaign --test queue-kill-master --minutes 1 --seed 7

A *test* is a workload under a fault with a durability; `table.py` makes all of them from what these
folders hold, so a new file in one of them is a new row or column and touches no other file:

    workloads/   what clients do: the programs of their processes, and which checkers judge them
    faults/      what the nemesis does, and how it knows that the fault took effect
    checkers/    pure functions over histories; they import no module of the product
    bugs/        mistakes planted into servers, each with the test that must find it

A run (`run.py`):

    1  a cluster of real processes, each service and each client in its own network namespace
    2  clients write histories (tests/history) by the public client alone
    3  one nemesis (`nemesis.py`) strikes by the seed, heals, and waits until the cluster serves
    4  senders end, readers read on until they have everything that was acknowledged
    5  the verdict (`verdict.py`): checkers and gates over all histories, in the order of time

docs/CAMPAIGN.md is the page for those who run it.
"""
