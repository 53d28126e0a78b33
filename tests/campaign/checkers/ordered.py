"""Checkers of ordered subjects: what tests/history/ordered judges, by the contract's sentences.

A strike of the nemesis counts as an outage of every broker group, from before it begins until the
cluster serves again; writers may wait then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from history.events import Anomaly, Operation
from history.ordered.checkers import check_ordered
from history.ordered.events import Deliver, Outage, Put, Rerouted, Settle

from campaign.values import Checker, Drained, Evidence, Strike

SLOW_NS: Final = 10_000_000_000
"""A message that waits longer for its answer needs a reason: machines of tests are busy."""


def all_settled(groups: tuple[str, ...]) -> Drained:
    """Whether each group was given every acknowledged message, and settled all it was given.

    A settlement without an answer counts: it may have been made, and nothing comes again then. So
    does what a client was given before it was struck: what it settled last is in no history.
    """

    def is_drained(events: Sequence[Operation]) -> bool:
        acked: set[tuple[str, str, int]] = set()
        given: dict[str, set[tuple[str, str, int]]] = {group: set() for group in groups}
        holder: dict[tuple[str, int, int], str] = {}
        for event in events:
            if isinstance(event, Put) and event.type == "ok":
                acked.update((event.process, each.key, each.serial) for each in event.messages)
            elif isinstance(event, Deliver):
                given[event.group].update(
                    (each.producer, each.key, each.serial) for each in event.handed
                )
                client = event.process.partition(".")[0]  # of consumer0.15809.0bba9ab2
                holder.update(
                    ((event.group, event.partition, each.sequence), client) for each in event.handed
                )
            elif isinstance(event, Settle) and event.type in ("ok", "info"):
                for sequence in event.sequences:
                    holder.pop((event.group, event.partition, sequence), None)
            elif isinstance(event, Strike) and event.type == "info":
                holder = {at: each for at, each in holder.items() if each not in event.targets}
        return not holder and all(acked <= given[each] for each in groups)

    return is_drained


def with_outages(events: Sequence[Operation]) -> Iterator[Operation]:
    """The events, and an outage of each broker group of the route for each strike."""
    groups = sorted(
        {
            part.broker_group
            for each in events
            if isinstance(each, Rerouted)
            for part in each.partitions
        }
    )
    strikes = 0
    for event in events:
        yield event
        if not isinstance(event, Strike) or event.type not in ("invoke", "ok"):
            continue
        strikes += event.type == "invoke"
        for at, group in enumerate(groups):
            yield Outage(
                process=event.process,
                type=event.type,
                t_ns=event.t_ns,
                op=strikes * len(groups) + at,
                broker_group=group,
                kind=event.fault,
            )


@lru_cache(maxsize=2)
def _all(evidence: Evidence) -> tuple[Anomaly, ...]:
    return check_ordered(
        with_outages(evidence.history),
        drained=evidence.is_drained,
        groups=evidence.groups,
        strict=evidence.strict,
        slow_ns=SLOW_NS,
        after_ns=SLOW_NS,
    ).anomalies


def _named(*names: str) -> Callable[[Evidence], list[Anomaly]]:
    return lambda evidence: [each for each in _all(evidence) if each.name in names]


CHECKERS = (
    Checker(
        name="ordered_no_loss",
        what="every acknowledged message of a key is given to every group and settled there",
        find=_named("lost", "unsettled"),
    ),
    Checker(
        name="ordered_no_phantom",
        what="what a group is given was sent, and did not fail for certain",
        find=_named("phantom"),
    ),
    Checker(
        name="key_order",
        what="first deliveries of a producer's messages of a key are in the order of sending",
        find=_named("skipped"),
    ),
    Checker(
        name="replay_in_order",
        what="a lane's next consumer begins at the first message not settled, and gets all",
        find=_named("torn_replay"),
    ),
    Checker(
        name="lane_fenced",
        what="who lost a lane settles nothing there, and nothing settled comes again",
        find=_named("zombie_ack", "came_back", "shared_token"),
    ),
    Checker(
        name="ranges_in_order",
        what="a partition is read when all before it in its range are finished",
        find=_named("early"),
    ),
    Checker(
        name="ordered_log",
        what="a key's messages lie in the order of sending, none behind a seal",
        find=_named("two_at_one_place", "behind_seal", "wrong_partition", "log_order"),
    ),
    Checker(
        name="ordered_stored_once",
        what="only a fence leaves a second copy, with the same id and in order",
        find=_named("stored_twice"),
    ),
    Checker(
        name="writers_go_on",
        what="writers wait for a change, an election or a fault, and for nothing else",
        find=_named("stalled"),
    ),
)
