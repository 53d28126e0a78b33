"""`qmq top` shows the message rates of a cluster on one screen, refreshed every two seconds (docs/OPERATIONS.md).

a terminal          uses the alternate screen and single keys; the previous screen content is restored at any exit
a dumb terminal     prints one screen below the other, without control sequences
no terminal         the same, as wide as the figures need
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

import qmq
from qmq.cli.output import EXIT_UNAVAILABLE, SERVER, Json, Server, console, errors, run
from qmq.cli.table import View
from qmq.cli.top_view import HELP, TopBy, TopChoice, TopSort, screen
from qmq.operations.rates import rates

if TYPE_CHECKING:
    from qmq.operations.cluster_snapshot import ClusterSnapshot

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
        float, typer.Option("--interval", min=0.1, help="Seconds between snapshots; more if a snapshot takes long.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Take two snapshots, show the rates, and exit.")] = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show rates in and out, lag in messages and in time, and broker groups, refreshed until q or Ctrl-C.

    With --json, prints a line of JSON per snapshot.
    """
    shown = Screen(TopChoice(by, sort))
    is_live = not once and not as_json and console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()
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
            self.trouble = "; ".join(f"metaserver {each.address}: {each.failure}" for each in found.metaservers)
            return False
        self.previous, self.now, self.trouble = self.now, found, ""
        return True

    def as_json(self) -> dict[str, Any]:
        """The output of --json for a snapshot."""
        if self.now is None:
            return {"error": self.trouble}
        silent = {"silent": dict(self.now.silent), "missing": dict(self.now.missing), "error": self.trouble}
        return rates(self.previous, self.now).as_json() | silent

    def lines(self, *, width: int | None, height: int | None = None) -> list[Text]:
        """The lines of the current screen."""
        if self.now is None:
            return [Text(self.trouble or "looking ...")]
        found = rates(self.previous, self.now)
        return screen(self.now, found, self.choice, width=width, height=height, trouble=self.trouble)


async def _top(server: str, interval_s: float, once: bool, as_json: bool, shown: Screen, is_live: bool) -> bool:
    """Run until stopped; with `once`, return whether a metaserver answered."""
    async with qmq.connect(server) as mq:
        if once:
            return await _once(mq, interval_s, as_json, shown)
        if is_live:
            await _live(mq, interval_s, shown)
        else:
            async for _ in _looks(mq, interval_s, shown):
                _print(shown, as_json)
        return True


async def _once(mq: qmq.Client, interval_s: float, as_json: bool, shown: Screen) -> bool:
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


async def _looks(mq: qmq.Client, interval_s: float, shown: Screen) -> AsyncIterator[bool]:
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
    """The pause after a snapshot that took `took_s` seconds: longer for very many subjects, but at most ten seconds."""
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


# --- a terminal --------------------------------------------------------------------------------------------------------


async def _live(mq: qmq.Client, interval_s: float, shown: Screen) -> None:
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
    """Use the alternate screen and read single keys without echo. The terminal's settings are restored at exit."""
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
