"""Runs all checkers of ordered histories in one call, and returns the report of a run.

    report = check_ordered(load(path), drained=True)
    assert report.ok, report

| checker | reports | file |
|---|---|---|
| lost, unsettled | a message that was acknowledged and never given to a group; one that was given and never settled | order.py |
| phantom | a message that was given, but never sent or certainly not stored | order.py |
| skipped | a message that was given for the first time after a later one of its line | order.py |
| torn_replay | a replay that does not begin where the group was, or leaves messages out | order.py |
| zombie_ack | an acknowledgement that was confirmed although another consumer had the lane by then | exclusive.py |
| came_back | a message that was given again although it was certainly settled | exclusive.py |
| shared_token | one token with two holders | exclusive.py |
| early | a partition that a group read before it had settled the earlier partitions | exclusive.py |
| two_at_one_place, behind_seal, wrong_partition, log_order | a log with wrong content | log.py |
| stored_twice | a second copy without a fence, with another id, or not part of an in-order replay | log.py |
| stalled | writers that were blocked without a reason | stalls.py |

The report counts, without judging: stored, unknown and failed messages; deliveries, and how many of them were repeated or late; messages
with two copies; changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from history.events import Operation
from history.ordered.exclusive import early, exclusivity
from history.ordered.log import log_order, stored_twice
from history.ordered.order import late, lost, order, phantom, repeated
from history.ordered.past import OrderedHistory
from history.ordered.stalls import AFTER_NS, SLOW_NS, Pauses, read_pauses, stalled, write_pauses
from history.past import Anomaly

SHOWN_MAX = 10
FOUND_MAX = 1000
"""How many anomalies each checker reports at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedReport:
    """What a run showed. Counts are of messages, except deliveries and their verdicts."""

    drained: bool
    counts: dict[str, int]
    write_pauses: dict[str, Pauses]
    """By occasion: a change, or a kind of outage."""
    read_pauses: dict[str, dict[str, Pauses]]
    """The same, by group."""
    anomalies: tuple[Anomaly, ...]

    @property
    def ok(self) -> bool:
        """True if no promise was broken. A run without any message is ok too: check the counts."""
        return not self.anomalies

    @property
    def names(self) -> Counter[str]:
        """How often each anomaly was found."""
        return Counter(anomaly.name for anomaly in self.anomalies)

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """The pauses: quantiles in seconds, and of how many."""
        named = {f"writes paused by {kind}, s": pauses for kind, pauses in self.write_pauses.items()}
        for group, found in self.read_pauses.items():
            named |= {f"{group} paused by {kind}, s": pauses for kind, pauses in found.items()}
        return {name: pauses.figures for name, pauses in named.items() if pauses.found_ns}

    def to_json(self, shown_max: int = SHOWN_MAX) -> dict[str, object]:
        """The report as plain values, with the number of all anomalies and the first few of each name."""
        shown = [str(found) for found in self._first(shown_max)]
        return {"ok": self.ok, "drained": self.drained, **self.counts, **self.figures, "found": dict(self.names), "anomalies": shown}

    def __str__(self) -> str:
        verdict = ", ".join(f"{name} {count:,}" for name, count in self.names.items()) or "no anomaly"
        head = f"{verdict} ({'drained' if self.drained else 'not drained'})"
        told = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        pauses = [f"{name}: {', '.join(f'{text} {value}' for text, value in found.items())}" for name, found in self.figures.items()]
        return "\n".join([head, told, *pauses, *map(str, self._first(SHOWN_MAX))])

    def _first(self, shown_max: int) -> Iterator[Anomaly]:
        told: Counter[str] = Counter()
        for anomaly in self.anomalies:
            told[anomaly.name] += 1
            if told[anomaly.name] <= shown_max:
                yield anomaly


def check_ordered(
    events: Iterable[Operation] | OrderedHistory,
    *,
    drained: bool,
    groups: Collection[str] = (),
    strict: Collection[str] = (),
    latest: Collection[str] = (),
    slow_ns: int = SLOW_NS,
    after_ns: int = AFTER_NS,
) -> OrderedReport:
    """Every checker over one history.

    `drained`: consumers continued until nothing came, so everything acknowledged must have been given and settled. `groups` must see
    everything (by default those that saw anything), `strict` are those with a strict gate, `latest` those that began at the route's end.

    Raises ValueError for a history that proves nothing: see `past`.
    """
    history = events if isinstance(events, OrderedHistory) else OrderedHistory(events, groups=groups, latest=latest)
    checks: list[Iterator[Anomaly]] = [
        lost(history) if drained else iter(()),
        phantom(history),
        order(history),
        exclusivity(history),
        early(history, strict=strict),
        log_order(history),
        stored_twice(history),
        stalled(history, slow_ns=slow_ns, after_ns=after_ns),
    ]
    return OrderedReport(
        drained=drained,
        counts=_counts(history),
        write_pauses=write_pauses(history),
        read_pauses={group: read_pauses(history, group) for group in history.groups},
        anomalies=tuple(found for check in checks for found in islice(check, FOUND_MAX)),
    )


def _counts(history: OrderedHistory) -> dict[str, int]:
    fates = Counter(history.messages.fate)
    return {
        "sent": len(history.messages.fate),
        "acknowledged": fates["ok"],
        "unknown": fates["info"] + fates["invoke"],
        "failed": fates["fail"],
        "stored": len(history.stored),
        "sent again after a fence": sum(history.messages.is_resent),
        "with two copies": len(history.copies),
        "deliveries": len(history.deliveries.message),
        "repeated": repeated(history),
        "late": late(history),
        "changes": len(history.routes.changes) - 1,
        "outages": len(history.outages),
    }
