"""Checkers of messages without order: what tests/history judges, each rule under its own name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from history import checkers as history_checkers
from history.events import Ack, Anomaly, History, Operation, Poll, Send

from campaign.values import Checker, Drained, Evidence


def all_seen(groups: tuple[str, ...]) -> Drained:
    """Whether each group got every acknowledged value."""

    def is_drained(events: Sequence[Operation]) -> bool:
        acked: set[int] = set()
        seen: dict[str, set[int]] = {group: set() for group in groups}
        for event in events:
            if isinstance(event, Send) and event.type == "ok":
                acked.update(event.values)
            elif isinstance(event, Poll) and event.type == "ok" and event.group in seen:
                seen[event.group].update(record.value for record in event.records)
        return all(acked <= found for found in seen.values())

    return is_drained


def all_acknowledged(groups: tuple[str, ...]) -> Drained:
    """Whether, besides, each group's acknowledgements of all of them were answered."""
    seen = all_seen(groups)

    def is_drained(events: Sequence[Operation]) -> bool:
        return seen(events) and not any(_unsettled(events, group) for group in groups)

    return is_drained


def _unsettled(events: Sequence[Operation], group: str) -> set[int]:
    """Values that a group got and cannot have acknowledged. An acknowledgement without an answer
    may have been taken, and nothing comes again then; so may one that was under way when its client
    died, which a later life of the client (`worker0.27`) shows.
    """
    got: set[int] = set()
    done: set[int] = set()
    under_way: dict[str, set[int]] = {}
    newest: dict[str, tuple[int, str]] = {}
    for event in events:
        if not isinstance(event, Poll | Ack) or event.group != group:
            continue
        client, life = event.process.partition(".")[0], (event.t_ns, event.process)
        newest[client] = max(newest.get(client, life), life)
        if isinstance(event, Poll):
            got.update(record.value for record in event.records if event.type == "ok")
        elif event.type == "invoke":
            under_way.setdefault(event.process, set()).update(event.values)
        else:
            under_way[event.process].difference_update(event.values)
            done.update(event.values if event.type != "fail" else ())
    last = {process for _, process in newest.values()}
    return (got - done).difference(
        *(values for process, values in under_way.items() if process not in last)
    )


def _lost(evidence: Evidence) -> list[Anomaly]:
    """Each group must have everything if the run was drained; else what was skipped counts."""
    if evidence.is_drained:
        return history_checkers.lost(evidence.history, drained=True, groups=evidence.groups)
    return history_checkers.lost_below(
        evidence.history, slack_ns=60_000_000_000, groups=evidence.groups
    )


def _all_consumed(evidence: Evidence) -> Iterator[Anomaly]:
    """A message that was handed out and whose acknowledgement failed or got no answer comes again,
    until one is answered.
    """
    if not evidence.is_drained:
        return
    for group in evidence.groups:
        left = _unsettled(evidence.history, group)
        if left:
            some = ", ".join(map(str, sorted(left)[:5]))
            yield Anomaly(
                "all_consumed", f"{len(left)} were handed to {group}, never settled: {some}"
            )


def _of(find: Callable[[History], list[Anomaly]]) -> Callable[[Evidence], list[Anomaly]]:
    return lambda evidence: find(evidence.history)


CHECKERS = (
    Checker(
        name="no_loss", what="every acknowledged message comes to every group once", find=_lost
    ),
    Checker(
        name="no_phantom",
        what="what comes was sent, and its send did not fail for certain",
        find=_of(history_checkers.phantom),
    ),
    Checker(
        name="stored_once",
        what="a message lies at one place, however often it was sent again",
        find=_of(history_checkers.duplicate_stored),
    ),
    Checker(
        name="stable_positions",
        what="a sequence of a queue names one message forever",
        find=_of(history_checkers.inconsistent_positions),
    ),
    Checker(
        name="send_order",
        what="a producer's batches lie in a queue in the order of sending, each in one piece",
        find=_of(history_checkers.send_order),
    ),
    Checker(
        name="read_in_order",
        what="a queue's only consumer gets first deliveries in order, none left out",
        find=_of(history_checkers.wrong_polls),
    ),
    Checker(
        name="acked_stays_done",
        what="what a group acknowledged, with an answer, never comes to it again",
        find=_of(history_checkers.delivered_after_ack),
    ),
    Checker(
        name="all_consumed",
        what="what was handed out comes again until its acknowledgement is answered",
        find=_all_consumed,
    ),
)
