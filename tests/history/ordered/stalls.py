"""Finds writers that were blocked without a reason.

There are two reasons: a change of the route closes the message's partition, from the seal to the publication of the next version; or a
broker group of the message's logical partition has no master. A message that waited longer than `slow_ns` for its answer, or failed,
must have been under way during such a time, or up to `after_ns` after its end (a producer must first learn of it and find the new route).

    change       [seal ........ published] after_ns
    k1 7      [put ................ ok]                 fine, for any duration
    k2 3                                          [put ................... ok]      stalled

The report has the longest pauses. Of a change: the longest time without an answered put in the ranges of its sources that overlaps the
change, counted from the change's beginning. Of an outage: the same for the group's partitions. For readers: the longest time without a
delivery.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from history.ordered.events import NEVER, Outaged, seconds
from history.ordered.past import OrderedHistory
from history.past import Anomaly

SLOW_NS = 1_000_000_000
AFTER_NS = 2_000_000_000
MARGIN_NS = 30_000_000_000
"""How far around a change its pause is looked for."""


@dataclass(frozen=True, slots=True)
class Excuse:
    """A time during which writers of some logical partitions may pause."""

    lps: frozenset[int]
    since_ns: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class Pauses:
    """Lengths of pauses in nanoseconds, one item for each pause."""

    found_ns: tuple[int, ...]

    @property
    def figures(self) -> dict[str, float]:
        """A row of a table."""
        return {"p50": self.quantile(0.5), "p99": self.quantile(0.99), "max": self.quantile(1.0), "of": len(self.found_ns)}

    def quantile(self, share: float) -> float:
        """Seconds: 0.5 gives the median, 1.0 the longest; 0 if there was no occasion."""
        ordered = sorted(self.found_ns)
        return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] / 1e9, 4) if ordered else 0.0


def stalled(history: OrderedHistory, *, slow_ns: int = SLOW_NS, after_ns: int = AFTER_NS) -> Iterator[Anomaly]:
    """Messages that waited or failed without an excuse; for each logical partition the longest wait is reported, with the number of
    messages.
    """
    columns, excuses = history.messages, excuses_of(history)
    slow: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for message, line in enumerate(columns.line):
        fate, since_ns, until_ns = columns.fate[message], columns.invoked_ns[message], columns.ended_ns[message]
        if fate != "invoke" and (fate != "ok" or until_ns - since_ns > slow_ns):
            lp = history.lp_of_line[line]
            if not any(_covers(each, lp, since_ns, until_ns, after_ns) for each in excuses):
                slow[lp].append((until_ns - since_ns, message))
    for lp, found in slow.items():
        waited_ns, message = max(found)
        since = seconds(columns.invoked_ns[message])
        what = f"{history.name(message)}, of logical partition {lp}, waited {waited_ns / 1e9:.3f} s from {since} on"
        also = f"; so did {len(found) - 1} more there" if len(found) > 1 else ""
        yield Anomaly("stalled", f"{what} and ended as {columns.fate[message]}, while no change or outage touched it{also}", ())


def _covers(excuse: Excuse, lp: int, since_ns: int, until_ns: int, after_ns: int) -> bool:
    return lp in excuse.lps and since_ns <= excuse.until_ns + after_ns and excuse.since_ns <= until_ns


def excuses_of(history: OrderedHistory) -> list[Excuse]:
    """Every change and every outage of the history."""
    return [*changes_of(history), *(Excuse(held(history, each, each.until_ns), each.since_ns, each.until_ns) for each in history.outages)]


def changes_of(history: OrderedHistory) -> list[Excuse]:
    """Each change with the ranges of its sources, if its times were recorded."""
    found: list[Excuse] = []
    for change in history.routes.changes.values():
        if change.began_ns is not None:
            lps = frozenset(lp for lps in history.routes.lps_of(change.sources) for lp in lps)
            found.append(Excuse(lps, change.began_ns, NEVER if change.published_ns is None else change.published_ns))
    return found


def held(history: OrderedHistory, outage: Outaged, until_ns: int) -> frozenset[int]:
    """The partitions that the group held from the beginning of the outage until `until_ns`."""
    return history.routes.held_by(outage.group, outage.since_ns, until_ns)


# --- figures -----------------------------------------------------------------------------------------------------------------


def write_pauses(history: OrderedHistory) -> dict[str, Pauses]:
    """By occasion: how long no put was answered to the sources of a change, or to what a broker group held when its outage began.

    A change has to wait for an outage of its ranges. The two together count as one separate occasion.
    """
    columns = history.messages
    ends = sorted((columns.ended_ns[each], columns.line[each]) for each, fate in enumerate(columns.fate) if fate == "ok")
    return _pauses(history, ends, _occasions(history))


def read_pauses(history: OrderedHistory, group: str) -> dict[str, Pauses]:
    """The same for a group: how long it was given nothing."""
    columns, line_of = history.deliveries, history.messages.line
    ends = [(columns.at_ns[each], line_of[columns.message[each]]) for each in history.of_group.get(group, ())]
    return _pauses(history, ends, _occasions(history))


def _occasions(history: OrderedHistory) -> dict[str, list[Excuse]]:
    found: defaultdict[str, list[Excuse]] = defaultdict(list)
    outages = [(each.kind, Excuse(held(history, each, each.since_ns), each.since_ns, each.until_ns)) for each in history.outages]
    for change in changes_of(history):
        meets = any(change.lps & each.lps and change.since_ns <= each.until_ns and each.since_ns <= change.until_ns for _, each in outages)
        found["a change in an outage" if meets else "a change"].append(change)
    for kind, outage in outages:
        found[kind].append(outage)
    return found


def _pauses(history: OrderedHistory, ends: Sequence[tuple[int, int]], occasions: Mapping[str, list[Excuse]]) -> dict[str, Pauses]:
    times_ns = [at_ns for at_ns, _ in ends]
    found: dict[str, Pauses] = {}
    for kind, excuses in occasions.items():
        longest = [_longest_ns(history, ends, times_ns, each) for each in excuses]
        found[kind] = Pauses(tuple(each for each in longest if each))
    return found


def _longest_ns(history: OrderedHistory, ends: Sequence[tuple[int, int]], times_ns: list[int], excuse: Excuse) -> int:
    """The longest pause that overlaps the span; 0 if there is no pause around the span."""
    first = bisect_left(times_ns, excuse.since_ns - MARGIN_NS)
    last = bisect_right(times_ns, min(excuse.until_ns, history.last_ns) + MARGIN_NS)
    own = [at_ns for at_ns, line in ends[first:last] if history.lp_of_line[line] in excuse.lps]
    gaps = [late - max(early, excuse.since_ns) for early, late in pairwise(own) if late > excuse.since_ns and early <= excuse.until_ns]
    return max(gaps, default=0)
