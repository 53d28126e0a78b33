"""Runs all checkers in one call, and returns the report of a run.

    report = check_all(load(path), drained=True)
    assert report.ok, report

| checker | reports | file |
|---|---|---|
| lost, lost_below | a message that was acknowledged and never handed out | losses.py |
| phantom | a message that was handed out, but never sent or certainly not stored | losses.py |
| duplicate_stored | one value at two positions | positions.py |
| inconsistent_positions | two values at one position | positions.py |
| send_order | a producer's messages are stored in another order than sent, or a batch is interrupted by other messages | positions.py |
| two_masters | two replicas acknowledged messages in one epoch | positions.py |
| nonmonotonic_poll | a queue's one consumer got an older message after a newer one; `int_nonmonotonic_poll`: in a poll | deliveries.py |
| poll_skip | the one consumer of a queue was not given a message between two that it got; `int_poll_skip`: in one poll | deliveries.py |
| delivered_after_ack | a message was handed out again after its acknowledgement was answered | deliveries.py |

The report counts, without judging: sent, acked, unknown, failed and polled values; deliveries, and how many of them were repetitions
(`delivered_twice`); values that were stored although their outcome was unknown (`recovered`); values that were acknowledged and that no
consumer has polled yet (`unseen`); the longest gaps between acknowledged sends.

Jepsen's words for the same: lost-write is `lost` and `lost_below`, duplicate is `duplicate_stored`, inconsistent-offsets is
`inconsistent_positions`, nonmonotonic-send is `send_order` ("reordered" of its queue tests), G1a is `phantom`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from history.deliveries import delivered_after_ack, delivered_twice, deliveries, recovered, wrong_polls
from history.events import Event, brief
from history.losses import Gap, availability, lost, lost_below, phantom
from history.past import Anomaly, History
from history.positions import duplicate_stored, inconsistent_positions, send_order, two_masters

SHOWN_MAX = 10

__all__ = [
    "Anomaly",
    "History",
    "Report",
    "availability",
    "check_all",
    "delivered_after_ack",
    "delivered_twice",
    "deliveries",
    "duplicate_stored",
    "inconsistent_positions",
    "lost",
    "lost_below",
    "phantom",
    "recovered",
    "send_order",
    "two_masters",
    "wrong_polls",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run showed. Counts are of distinct values, except deliveries and delivered_twice."""

    drained: bool
    sent: int
    acked: int
    unknown: int
    failed: int
    polled: int
    deliveries: int
    delivered_twice: int
    recovered: int
    unseen: int
    gaps: tuple[Gap, ...]
    anomalies: tuple[Anomaly, ...]

    @property
    def ok(self) -> bool:
        """True if no promise was broken. A run without any message is ok too: check `acked`."""
        return not self.anomalies

    @property
    def counts(self) -> dict[str, int]:
        """The figures by name."""
        names = ("sent", "acked", "unknown", "failed", "polled", "deliveries", "delivered_twice", "recovered", "unseen")
        return {name: getattr(self, name) for name in names}

    @property
    def names(self) -> Counter[str]:
        """How often each anomaly was found."""
        return Counter(anomaly.name for anomaly in self.anomalies)

    def to_json(self, shown_max: int = SHOWN_MAX) -> dict[str, object]:
        """The report as plain values, with the number of all anomalies and the first few of each name."""
        shown = [{"name": found.name, "what": found.what, "evidence": [*map(brief, found.evidence)]} for found in self._first(shown_max)]
        gaps = [gap._asdict() for gap in self.gaps]
        return {"ok": self.ok, "drained": self.drained, **self.counts, "gaps": gaps, "found": dict(self.names), "anomalies": shown}

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        longest = f"; longest gap {self.gaps[0].gap_ns / 1e6:,.1f} ms" if self.gaps else ""
        verdict = ", ".join(f"{name} {count:,}" for name, count in self.names.items()) or "no anomaly"
        head = f"{verdict} ({'drained' if self.drained else 'not drained'})"
        return "\n".join([head, figures + longest, *map(str, self._first(SHOWN_MAX))])

    def _first(self, shown_max: int) -> Iterable[Anomaly]:
        told: Counter[str] = Counter()
        for anomaly in self.anomalies:
            told[anomaly.name] += 1
            if told[anomaly.name] <= shown_max:
                yield anomaly


def check_all(events: Iterable[Event], *, drained: bool, slack_ns: int = 0, groups: Collection[str] = ()) -> Report:
    """Every checker over one history.

    `drained`: consumers continued until nothing came, so everything acknowledged must have been seen. If not, `lost_below` judges instead
    (it finds a part of the same, so it is left out of a drained history), with `slack_ns` for leases and delays.
    """
    history = events if isinstance(events, History) else History(events)
    anomalies = [
        *(lost(history, drained=True, groups=groups) if drained else lost_below(history, slack_ns=slack_ns, groups=groups)),
        *phantom(history),
        *duplicate_stored(history),
        *inconsistent_positions(history),
        *send_order(history),
        *wrong_polls(history),
        *delivered_after_ack(history),
        *two_masters(history),
    ]
    acked, unknown, failed = map(len, history.outcomes)
    return Report(
        drained=drained,
        sent=acked + unknown + failed,
        acked=acked,
        unknown=unknown,
        failed=failed,
        polled=len(history.seen_by_any),
        deliveries=deliveries(history),
        delivered_twice=delivered_twice(history),
        recovered=recovered(history),
        unseen=len(history.outcomes.acked - history.seen_by_any),
        gaps=tuple(availability(history)),
        anomalies=tuple(anomalies),
    )
