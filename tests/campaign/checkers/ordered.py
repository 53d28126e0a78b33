"""Checkers of ordered subjects: what tests/history/ordered judges, by the contract's sentences.

A strike of the nemesis counts as an outage of every broker group, from before it begins until the
cluster serves again; writers may wait then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from history.events import Anomaly, Operation
from history.ordered.checkers import check_ordered
from history.ordered.events import Deliver, Outage, Put, Rerouted, Settle

from campaign.values import Checker, Doubt, Drained, Evidence, Strike

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


def doubting(
    events: Sequence[Operation], doubts: Sequence[Doubt]
) -> tuple[Sequence[Operation], int]:
    """Doubtful is a message whose put was answered in such a time, or was under way then: its
    outcome is unknown, and no delivery and no settlement has it.
    """
    names = _doubtful(events, doubts)
    places = {
        (event.partition, each.sequence)
        for event in events
        if isinstance(event, Deliver)
        for each in event.handed
        if (each.producer, each.key, each.serial) in names
    }
    return tuple(_without(events, names, places)), len(names)


def _doubtful(
    events: Sequence[Operation], doubts: Sequence[Doubt]
) -> frozenset[tuple[str, str, int]]:
    times: dict[tuple[str, str, int], list[int]] = {}
    for event in events if doubts else ():
        if isinstance(event, Put):
            for each in event.messages:
                times.setdefault((event.process, each.key, each.serial), []).append(event.t_ns)
    return frozenset(
        name
        for name, found in times.items()
        if any(doubt.has(found[0], found[-1], is_open=len(found) == 1) for doubt in doubts)
    )


def _without(
    events: Sequence[Operation],
    names: frozenset[tuple[str, str, int]],
    places: set[tuple[int, int]],
) -> Iterator[Operation]:
    for event in events:
        if names and isinstance(event, Put) and event.type == "ok":
            known = [(event.process, each.key, each.serial) not in names for each in event.messages]
            unsaid = [
                each for each, is_known in zip(event.messages, known, strict=True) if not is_known
            ]
            if unsaid:
                yield replace(event, type="info", messages=tuple(unsaid), places=(), resent=None)
                said = [
                    pair
                    for pair, is_known in zip(
                        zip(event.messages, event.places, strict=True), known, strict=True
                    )
                    if is_known
                ]
                if not said:
                    continue
                event = replace(
                    event,
                    messages=tuple(message for message, _ in said),
                    places=tuple(place for _, place in said),
                )
        elif names and isinstance(event, Deliver):
            handed = tuple(
                each for each in event.handed if (each.producer, each.key, each.serial) not in names
            )
            event = replace(event, handed=handed)
        elif names and isinstance(event, Settle):
            sequences = tuple(
                each for each in event.sequences if (event.partition, each) not in places
            )
            event = replace(event, sequences=sequences)
        yield event


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
