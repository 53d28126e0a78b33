"""`qmq top` shows the message rates of a cluster on one screen, refreshed every two seconds
(docs/OPERATIONS.md).

a terminal          uses the alternate screen and single keys; the previous screen content is
                    restored at any exit
a dumb terminal     prints one screen below the other, without control sequences
no terminal         the same, as wide as the figures need
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from qmq.cli.arguments import SECONDS_MAX, View, age
from qmq.cli.output import EXIT_UNAVAILABLE, SERVER, Json, Server, administration, run
from qmq.cli.tables import console, errors, table_lines
from qmq.operations.snapshot import ClusterSnapshot
from qmq.operations.snapshot_reading import (
    BrokerGroupRate,
    ClusterRates,
    GroupRate,
    ReaderRate,
    SubjectRate,
    rates,
)
from qmq.operations.text import counted, size_in_words

if TYPE_CHECKING:
    from qmq.cli.administration import Administration
    from qmq.operations.snapshot import ClusterSnapshot


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
    TopBy.BROKER: (
        "broker group",
        "health",
        "in/s",
        "out/s",
        "replicas",
        "master",
        "stored",
        "free",
    ),
}
_RIGHT: Final = {
    "in/s",
    "out/s",
    "lag",
    "age",
    "groups",
    "messages",
    "bytes",
    "consumers",
    "replicas",
    "stored",
    "free",
}


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
    snapshot: ClusterSnapshot,
    found: ClusterRates,
    choice: TopChoice,
    *,
    width: int | None,
    height: int | None = None,
    trouble: str = "",
) -> list[Text]:
    """The lines of a screen: a header, a table, and notes about missing data. Without a size, as
    large as necessary.
    """
    head = [
        Text(line if width is None else line[:width], "bold") for line in _head(snapshot, found)
    ]
    notes = [
        Text(line if width is None else line[:width], "red") for line in _notes(snapshot, trouble)
    ]
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
    readers = f"  {counted(len(found.readers), 'reader')}" if found.readers else ""
    lag = sum(each.lag_messages for each in found.groups)
    oldest_ms = max((each.lag_ms for each in found.groups), default=0)
    return [
        (
            f"in {per_second(found.in_per_s)}/s  out {per_second(found.out_per_s)}/s{over}  lag "
            f"{short(lag)}, oldest {age(oldest_ms)}"
        ),
        f"{subjects}  {groups}{readers}  {well} of {len(snapshot.broker_groups)} broker groups "
        "read-write",
    ]


def _notes(snapshot: ClusterSnapshot, trouble: str) -> list[str]:
    found = [trouble] if trouble else []
    found += [
        f"partial: broker group {group} is missing ({reason})"
        for group, reason in sorted(snapshot.silent.items())
    ]
    return found + [
        f"partial: no {question.replace('_', ' ')} ({reason})"
        for question, reason in sorted(snapshot.missing.items())
    ]


_Row = tuple[tuple[Any, ...], Sequence[Any]]
"""(the values to sort by, the cells)."""


def _rows(found: ClusterRates, choice: TopChoice) -> list[_Row]:
    if choice.by is TopBy.SUBJECT:
        return [(_subject_key(each, choice.sort), _subject_cells(each)) for each in found.subjects]
    if choice.by is TopBy.GROUP:
        groups = [(_group_key(each, choice.sort), _group_cells(each)) for each in found.groups]
        return groups + [
            (_reader_key(each, choice.sort), _reader_cells(each)) for each in found.readers
        ]
    return [(_broker_key(each, choice.sort), _broker_cells(each)) for each in found.broker_groups]


def _key(
    sort: TopSort, name: str, figures: dict[TopSort, Callable[[], float | None]]
) -> tuple[Any, ...]:
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


def _reader_key(each: ReaderRate, sort: TopSort) -> tuple[Any, ...]:
    figures: dict[TopSort, Callable[[], float | None]] = {
        TopSort.OUT: lambda: each.out_per_s,
        TopSort.LAG: lambda: each.lag_messages,
        TopSort.AGE: lambda: each.lag_ms,
    }
    return _key(sort, f"{each.subject} {each.reader}", figures)


def _broker_key(each: BrokerGroupRate, sort: TopSort) -> tuple[Any, ...]:
    figures: dict[TopSort, Callable[[], float | None]] = {
        TopSort.IN: lambda: each.in_per_s,
        TopSort.OUT: lambda: each.out_per_s,
    }
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
    return (
        each.subject,
        each.group,
        per_second(each.out_per_s),
        short(each.lag_messages),
        age(each.lag_ms),
        str(each.consumers),
        state,
    )


def _reader_cells(each: ReaderRate) -> Sequence[Any]:
    """A reader without a group, in the table of groups."""
    state, color = f"reader, committed {age(each.committed_ms_ago)} ago", ""
    if each.lost_messages:
        state, color = f"reader, {short(each.lost_messages)} lost", "red"
    elif each.is_near_loss:
        state, color = "reader, near loss", "red"
    elif each.is_silent:
        state, color = f"reader, silent for {age(each.seen_ms_ago)}", "yellow"
    return (
        each.subject,
        each.reader,
        per_second(each.out_per_s),
        short(each.lag_messages),
        age(each.lag_ms),
        "",
        Text(state, color),
    )


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
    """A rate, with one decimal below ten so that a message every ten seconds is
    visible; empty if unknown.
    """
    if rate is None:
        return ""
    return f"{rate:.1f}" if 0 < rate < 10 else short(round(rate))


def short(number: int) -> str:
    """A number, exact up to a hundred thousand, then with three digits."""
    if number < 100_000:
        return f"{number:,}"
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return (
                f"{number / size:.3g}{unit}"
                if number / size < 999.5
                else f"{number // size:,}{unit}"
            )
    raise AssertionError("a hundred thousand has a unit")


CONTROL: Final = "\x1b["
REST: Final = 9
"""Taking snapshots takes at most a tenth of the time."""
REST_S_MAX: Final = 10.0
ENTER: Final = f"{CONTROL}?1049h{CONTROL}?25l"
"""Switches to the alternate screen and hides the cursor."""
LEAVE: Final = f"{CONTROL}?25h{CONTROL}?1049l"
HOME: Final = f"{CONTROL}H"
CLEAR_LINE: Final = f"{CONTROL}K"
CLEAR_BELOW: Final = f"{CONTROL}J"


def top(
    by: Annotated[TopBy, typer.Option("--by", help="What each line shows.")] = TopBy.SUBJECT,
    sort: Annotated[TopSort, typer.Option("--sort", help="What comes first.")] = TopSort.IN,
    interval_s: Annotated[
        float,
        typer.Option(
            "--interval",
            min=0.1,
            max=SECONDS_MAX,
            help="Seconds between snapshots; more if a snapshot takes long.",
        ),
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Take two snapshots, show the rates, and exit.")
    ] = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show rates in and out, lag in messages and in time, and broker groups, refreshed until q or
    Ctrl-C.

    With --json, prints a line of JSON per snapshot.
    """
    shown = Screen(TopChoice(by, sort))
    is_live = (
        not once
        and not as_json
        and console.is_terminal
        and not console.is_dumb_terminal
        and sys.stdin.isatty()
    )
    is_found = run(_top(server, interval_s, once, as_json, shown, is_live))
    if not is_found:
        raise typer.Exit(EXIT_UNAVAILABLE)


class Screen:
    """The screen's options, and the snapshots it shows."""

    def __init__(self, choice: TopChoice) -> None:
        self.choice = choice
        self.previous: ClusterSnapshot | None = None
        self.now: ClusterSnapshot | None = None
        self.trouble = ""

    def take(self, found: ClusterSnapshot) -> bool:
        """Take a new snapshot. If no metaserver answers, keep the last one and return False."""
        if not found.is_reachable:
            self.trouble = "; ".join(
                f"metaserver {each.address}: {each.failure}" for each in found.metaservers
            )
            return False
        self.previous, self.now, self.trouble = self.now, found, ""
        return True

    def as_json(self) -> dict[str, Any]:
        """The output of --json for a snapshot."""
        if self.now is None:
            return {"error": self.trouble}
        silent = {
            "silent": dict(self.now.silent),
            "missing": dict(self.now.missing),
            "error": self.trouble,
        }
        return rates(self.previous, self.now).as_json() | silent

    def lines(self, *, width: int | None, height: int | None = None) -> list[Text]:
        """The lines of the current screen."""
        if self.now is None:
            return [Text(self.trouble or "looking ...")]
        found = rates(self.previous, self.now)
        return screen(
            self.now, found, self.choice, width=width, height=height, trouble=self.trouble
        )


async def _top(
    server: str, interval_s: float, once: bool, as_json: bool, shown: Screen, is_live: bool
) -> bool:
    """Run until stopped; with `once`, return whether a metaserver answered."""
    async with administration(server) as mq:
        if once:
            return await _once(mq, interval_s, as_json, shown)
        if is_live:
            await _live(mq, interval_s, shown)
        else:
            async for _ in _looks(mq, interval_s, shown):
                _print(shown, as_json)
        return True


async def _once(mq: Administration, interval_s: float, as_json: bool, shown: Screen) -> bool:
    looks = 0
    async for is_found in _looks(mq, interval_s, shown):
        looks += 1
        if not is_found:
            errors.print(Text(shown.trouble), soft_wrap=True)
            return False
        if looks == 2:
            break
    _print(shown, as_json)
    return True


async def _looks(mq: Administration, interval_s: float, shown: Screen) -> AsyncIterator[bool]:
    """Yields after each snapshot whether a metaserver answered."""
    from qmq.operations.snapshot_reading import CLUSTER, GROUPS, SUBJECTS, read_snapshot

    loop = asyncio.get_running_loop()
    while True:
        begin_s = loop.time()
        snapshot = await read_snapshot(mq.metadata, parts={CLUSTER, SUBJECTS, GROUPS})
        took_s = loop.time() - begin_s
        yield shown.take(snapshot)
        await asyncio.sleep(pause_s(interval_s, took_s))


def pause_s(interval_s: float, took_s: float) -> float:
    """The pause after a snapshot that took `took_s` seconds: longer for very many subjects, but at
    most ten seconds.
    """
    return max(interval_s, min(took_s * REST, REST_S_MAX))


def _print(shown: Screen, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(shown.as_json()) + "\n")
        sys.stdout.flush()
        return
    width = console.width if console.is_terminal and not View.is_wide else None
    for line in shown.lines(width=width):
        console.print(line, soft_wrap=True)
    console.print()


# --- a terminal -----------------------------------------------------------------------------------


async def _live(mq: Administration, interval_s: float, shown: Screen) -> None:
    """Draw after each snapshot and each key, until q, Ctrl-C or SIGTERM."""
    stopped = asyncio.Event()

    def typed() -> None:
        for key in _keys():
            if key == "q":
                stopped.set()
            shown.choice = shown.choice.after(key)
        draw(shown)

    async def look() -> None:
        async for _ in _looks(mq, interval_s, shown):
            draw(shown)

    loop = asyncio.get_running_loop()
    with full_screen():
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        loop.add_reader(sys.stdin.fileno(), typed)
        looking = asyncio.create_task(look())
        waiting = asyncio.create_task(stopped.wait())
        try:
            draw(shown)
            await asyncio.wait([looking, waiting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(sys.stdin.fileno())
            loop.remove_signal_handler(signal.SIGTERM)
            for task in (looking, waiting):
                task.cancel()
            ended, _ = await asyncio.gather(looking, waiting, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended


def _keys() -> str:
    with suppress(BlockingIOError):
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace")
    return ""


@contextmanager
def full_screen() -> Iterator[None]:
    """Use the alternate screen and read single keys without echo. The terminal's settings are
    restored at exit.
    """
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        _write(ENTER)
        yield
    finally:
        _write(LEAVE)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def draw(shown: Screen) -> None:
    """Draw the whole screen over the old one, without flicker."""
    width, height = console.size
    lines = [*shown.lines(width=width, height=height - 1)]
    lines += [Text()] * (height - 1 - len(lines))
    with console.capture() as captured:
        for line in lines:
            console.print(line, soft_wrap=True)
        console.print(Text(HELP[:width], "reverse"), soft_wrap=True, end="")
    _write(HOME + captured.get().replace("\n", f"{CLEAR_LINE}\r\n") + CLEAR_LINE + CLEAR_BELOW)
