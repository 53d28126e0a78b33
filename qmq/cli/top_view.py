"""The screen of `qmq top` as lines of text. Pure: the caller passes size and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rich.text import Text

from qmq.cli.table import table_lines
from qmq.cli.times import age
from qmq.operations.cluster_snapshot import ClusterSnapshot
from qmq.operations.finding import counted, size_in_words
from qmq.operations.rates import BrokerGroupRate, ClusterRates, GroupRate, SubjectRate


class TopBy(StrEnum):
    """The content of each line."""

    SUBJECT = "subject"
    GROUP = "group"
    BROKER = "broker"


class TopSort(StrEnum):
    """The sort order: highest value first, or by name."""

    IN = "in"
    OUT = "out"
    LAG = "lag"
    AGE = "age"
    NAME = "name"


KEYS: Final = {
    "s": TopBy.SUBJECT,
    "g": TopBy.GROUP,
    "b": TopBy.BROKER,
    "i": TopSort.IN,
    "o": TopSort.OUT,
    "l": TopSort.LAG,
    "a": TopSort.AGE,
    "n": TopSort.NAME,
}
"""The keys of `qmq top`; q quits."""
HELP: Final = "s subjects  g groups  b brokers | by i in  o out  l lag  a age  n name | q quit"
_COLUMNS: Final = {
    TopBy.SUBJECT: ("subject", "in/s", "out/s", "lag", "age", "groups", "messages", "bytes"),
    TopBy.GROUP: ("subject", "group", "out/s", "lag", "age", "consumers", "state"),
    TopBy.BROKER: ("broker group", "health", "in/s", "out/s", "replicas", "master", "stored", "free"),
}
_RIGHT: Final = {"in/s", "out/s", "lag", "age", "groups", "messages", "bytes", "consumers", "replicas", "stored", "free"}


@dataclass(frozen=True, slots=True)
class TopChoice:
    """The table that is shown, and its sort order."""

    by: TopBy = TopBy.SUBJECT
    sort: TopSort = TopSort.IN

    def after(self, key: str) -> TopChoice:
        """The choice after a key; unchanged for an unknown key."""
        meant = KEYS.get(key)
        if isinstance(meant, TopBy):
            return TopChoice(meant, self.sort)
        return TopChoice(self.by, meant) if isinstance(meant, TopSort) else self


def screen(
    snapshot: ClusterSnapshot, found: ClusterRates, choice: TopChoice, *, width: int | None, height: int | None = None, trouble: str = ""
) -> list[Text]:
    """The lines of a screen: a header, a table, and notes about missing data. Without a size, as large as necessary."""
    head = [Text(line if width is None else line[:width], "bold") for line in _head(snapshot, found)]
    notes = [Text(line if width is None else line[:width], "red") for line in _notes(snapshot, trouble)]
    rows = [cells for _, cells in sorted(_rows(found, choice), key=lambda each: each[0])]
    room = None if height is None else max(height - len(head) - len(notes) - 2, 1)
    shown = rows if room is None or len(rows) <= room else rows[: max(room - 1, 1)]
    table = table_lines(_COLUMNS[choice.by], shown, width=width, now_ms=found.time_ms, right=_RIGHT)
    more = [Text(f"{len(rows) - len(shown):,} more", "dim")] if len(shown) < len(rows) else []
    lines = [*head, *table, *more, *notes]
    return lines if height is None else lines[:height]


def _head(snapshot: ClusterSnapshot, found: ClusterRates) -> list[str]:
    well = sum(each.health == "read-write" for each in snapshot.broker_groups)
    over = f" over {found.over_ms / 1000:.1f} s" if found.over_ms else ""
    subjects, groups = counted(len(found.subjects), "subject"), counted(len(found.groups), "group")
    lag = sum(each.lag_messages for each in found.groups)
    oldest_ms = max((each.lag_ms for each in found.groups), default=0)
    return [
        f"in {per_second(found.in_per_s)}/s  out {per_second(found.out_per_s)}/s{over}  lag {short(lag)}, oldest {age(oldest_ms)}",
        f"{subjects}  {groups}  {well} of {len(snapshot.broker_groups)} broker groups read-write",
    ]


def _notes(snapshot: ClusterSnapshot, trouble: str) -> list[str]:
    found = [trouble] if trouble else []
    found += [f"partial: broker group {group} is missing ({reason})" for group, reason in sorted(snapshot.silent.items())]
    return found + [f"partial: no {question.replace('_', ' ')} ({reason})" for question, reason in sorted(snapshot.missing.items())]


_Row = tuple[tuple[Any, ...], Sequence[Any]]
"""(the values to sort by, the cells)."""


def _rows(found: ClusterRates, choice: TopChoice) -> list[_Row]:
    if choice.by is TopBy.SUBJECT:
        return [(_subject_key(each, choice.sort), _subject_cells(each)) for each in found.subjects]
    if choice.by is TopBy.GROUP:
        return [(_group_key(each, choice.sort), _group_cells(each)) for each in found.groups]
    return [(_broker_key(each, choice.sort), _broker_cells(each)) for each in found.broker_groups]


def _key(sort: TopSort, name: str, figures: dict[TopSort, Callable[[], float | None]]) -> tuple[Any, ...]:
    """Sorts the highest value first, equal values by name. Lines without the value come last."""
    figure = figures.get(sort)
    return (-((figure() if figure is not None else 0) or 0), name)


def _subject_key(each: SubjectRate, sort: TopSort) -> tuple[Any, ...]:
    return _key(
        sort,
        each.subject,
        {
            TopSort.IN: lambda: each.in_per_s,
            TopSort.OUT: lambda: each.out_per_s,
            TopSort.LAG: lambda: each.lag_messages,
            TopSort.AGE: lambda: each.lag_ms,
        },
    )


def _group_key(each: GroupRate, sort: TopSort) -> tuple[Any, ...]:
    figures: dict[TopSort, Callable[[], float | None]] = {
        TopSort.OUT: lambda: each.out_per_s,
        TopSort.LAG: lambda: each.lag_messages,
        TopSort.AGE: lambda: each.lag_ms,
    }
    return _key(sort, f"{each.subject} {each.group}", figures)


def _broker_key(each: BrokerGroupRate, sort: TopSort) -> tuple[Any, ...]:
    figures: dict[TopSort, Callable[[], float | None]] = {TopSort.IN: lambda: each.in_per_s, TopSort.OUT: lambda: each.out_per_s}
    return _key(sort, each.broker_group, figures)


def _subject_cells(each: SubjectRate) -> Sequence[Any]:
    return (
        each.subject,
        per_second(each.in_per_s),
        per_second(each.out_per_s) if each.groups else "",
        short(each.lag_messages) if each.groups else "",
        age(each.lag_ms) if each.groups else "",
        str(each.groups),
        short(each.stored_messages),
        size_in_words(each.stored_bytes),
    )


def _group_cells(each: GroupRate) -> Sequence[Any]:
    state = Text("paused", "yellow") if each.is_paused else Text("")
    if not each.is_paused and each.lag_messages and not each.consumers:
        state = Text("no consumers", "red")
    return (each.subject, each.group, per_second(each.out_per_s), short(each.lag_messages), age(each.lag_ms), str(each.consumers), state)


def _broker_cells(each: BrokerGroupRate) -> Sequence[Any]:
    color = {"read-write": "green", "read-only": "yellow"}.get(each.health, "red")
    free = "" if each.disk_free_bytes is None else size_in_words(each.disk_free_bytes)
    return (
        each.broker_group,
        Text(each.health, color),
        per_second(each.in_per_s),
        per_second(each.out_per_s),
        f"{each.answering}/{each.replicas}",
        each.master,
        size_in_words(each.stored_bytes),
        free,
    )


def per_second(rate: float | None) -> str:
    """A rate, with one decimal below ten so that a message every ten seconds is visible; empty if unknown."""
    if rate is None:
        return ""
    return f"{rate:.1f}" if 0 < rate < 10 else short(round(rate))


def short(number: int) -> str:
    """A number, exact up to a hundred thousand, then with three digits."""
    if number < 100_000:
        return f"{number:,}"
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number / size < 999.5 else f"{number // size:,}{unit}"
    raise AssertionError("a hundred thousand has a unit")
