"""Runs one seed: senders, cancellers and movers, recurring messages, a master that dies, is cut off
or pauses; and a judge.

The judge is system/delay_workload.py.

The world's clock is virtual: a simulated hour takes a second or so. `python -m delaysim.run SEED`
repeats a run.

Planted bugs: each one breaks a rule of docs/DELAY.md, and the simulator must find it. `patch`
undoes them.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from delaysim.group import DelayGroup, RealTime, SimMaster, first_id
from ordersim.loop import RAISED, Violation, bury, own_violations
from sim.world import World
from system.delay_workload import Sight, Wish, judge, out_of_order

from qmq.delay.admin import EngineAdmin
from qmq.delay.batches import Places, planned_ms
from qmq.delay.engine import Engine
from qmq.delay.plan_log import StorePlanLog
from qmq.delay.recurrence import next_run
from qmq.errors import MessageNotFound, TooLate
from qmq.log.actions import Recur
from qmq.model import CRON, PLANNED, SCHEDULE_ID, ZONE, DelayedId, MessageId
from qmq.wire.batch import encode
from qmq.wire.batch_columns import BatchFlag, Columns

_start, _next, _pending, _plan, _recur = (
    Engine.start,
    Engine._next,
    Engine._pending,
    StorePlanLog.plan,
    StorePlanLog._recur,
)


def _forget_plans(self: Engine) -> None:
    with patch.object(self.schedule, "plans", {}):
        _start(self)


def _ask_nobody(self: EngineAdmin, place: Any) -> bool:
    return self._engine().schedule.state_of(place) == "pending"


def _recur_again(self: StorePlanLog, message: Any) -> None:
    due_ms = next_run(
        message.headers[CRON].decode(), message.headers[ZONE].decode(), message.due_ms
    )
    self._writer.act(Recur(*message.place, due_ms))


def _recur_from_the_due_time(self: StorePlanLog, message: Any) -> None:
    """As release 0.2: the runs between a moved run's time by the schedule and its due time are
    skipped, or it comes again.
    """
    headers = {name: value for name, value in message.headers.items() if name != PLANNED}
    _recur(self, replace(message, headers=headers))


def _hold_nothing(self: Engine) -> Any:
    found = _next(self)
    return None if found is None else (found[0], True)


class _Hasty:
    def __init__(self, writer: Any) -> None:
        self.act = writer.act

    async def committed(self) -> None:
        """Says so."""


async def _send_uncommitted(self: StorePlanLog, draft: Any) -> Any:
    writer, self._writer = self._writer, _Hasty(self._writer)
    try:
        return await _plan(self, draft)
    finally:
        self._writer = writer


def _tick_ahead(self: Engine) -> Any:
    self._boundary_ms += self.config.tick_ms
    return _next(self)


def _miss_what_comes(_: Engine, __: Places) -> None:
    return


def _take_twice(self: Engine, places: Places) -> None:
    """Dispatch messages again that are already being dispatched, if the wheel returns them."""
    _pending(self, places)
    self.loader.stored(places)


def _trust_the_wheel(self: Engine, places: Places) -> Places:
    return places


@asynccontextmanager
async def _read_what_is_written(self: EngineAdmin) -> AsyncIterator[Any]:
    yield self._engine().schedule


BUGS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "plans of earlier masters are forgotten": (Engine, "start", _forget_plans),
    "what the dispatcher has is cancelled without asking it": (
        EngineAdmin,
        "_is_free",
        _ask_nobody,
    ),
    "what is shown may be undone": (EngineAdmin, "_committed_read", _read_what_is_written),
    "a run that is planned again begets another next run": (StorePlanLog, "_recur", _recur_again),
    "the next run is reckoned from where the last one was moved to": (
        StorePlanLog,
        "_recur",
        _recur_from_the_due_time,
    ),
    "on ordered subjects what is due overtakes what is late": (Engine, "_next", _hold_nothing),
    "a plan is sent before it is committed": (StorePlanLog, "plan", _send_uncommitted),
    "a tick comes too early": (Engine, "_next", _tick_ahead),
    "what is stored for the near future is not put into the wheel": (
        Engine,
        "_pending",
        _miss_what_comes,
    ),
    "what is stored is put into the wheel twice, and nobody asks whether it left": (
        Engine,
        "_pending",
        _take_twice,
    ),
    "what was cancelled while it was in the wheel is delivered": (
        Engine,
        "_pending_of",
        _trust_the_wheel,
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is planted until the end of the block."""
    owner, attribute, bug = BUGS[name]
    with patch.object(owner, attribute, bug):
        yield


PLAIN, ORDERED = "plain", "ordered"
MINUTE_MS = 60_000
DELAYS_MS = (-5_000, 0, 300, 2_000, 15_000, 70_000, 200_000)
CALM_MS = 400_000
_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class Result:
    """The result of a seed."""

    seed: int
    sent: int = 0
    delivered: int = 0
    cancelled: int = 0
    runs: int = 0
    lives: int = 0
    failure: str = ""


class Simulation:
    """See the module."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.world = World(seed)
        self.seed = seed
        self.random = self.world.random
        self.real_time = RealTime(self.world)
        self.group = DelayGroup(self.world, folder, self.real_time, self.broke)
        self.wishes: dict[int, Wish] = {}
        self.in_time: set[int] = set()
        self.recurring: dict[str, int] = {}
        """First id -> when it was acknowledged."""
        self.stopped: dict[str, int] = {}
        """First id -> when it was cancelled."""
        self.is_calm = False
        self._number = 0

    def broke(self, name: str, cause: BaseException) -> None:
        """Record an exception that was not caught."""
        if not RAISED:
            RAISED.append(Violation(f"{name}: {type(cause).__name__}: {cause}"))
            RAISED[0].__cause__ = cause

    def run(self, minutes: int) -> Result:
        """Run the simulation to its end."""
        self.group.elect()
        self._send_forever()
        self.world.after(3_000, self._nemesis)
        self.world.run(minutes * MINUTE_MS)
        self.is_calm, self.real_time.is_away = True, False
        if self.group.master is None:
            self.group.elect()
        self.world.run(self.world.now + CALM_MS)
        return self._judged()

    # --- clients ----------------------------------------------------------------------------------

    def _send_forever(self) -> None:
        if self.is_calm:
            return
        if self.group.master is not None:
            # A client's call lives with the master that it is made to: when that dies, the caller
            # does not know what became of it.
            send = self._send_recurring if self.random.random() < 0.03 else self._send
            self.group.master.loop.create_task(send(self.group.master))
        self.world.after(self.random.randrange(600), self._send_forever)

    async def _send(self, master: SimMaster) -> None:
        self._number += 1
        number, subject = self._number, self.random.choice((PLAIN, ORDERED))
        wishes = [self._wish(at) for at in range(self.random.choice((1, 1, 3, 12)))]
        _, region = encode(
            subject.encode(),
            Columns(
                [str(wish.number).encode() for wish in wishes],
                [f"k{wish.key}".encode() for wish in wishes],
                due_times_ms=[min(wish.due_times_ms) for wish in wishes],
            ),
            producer_id=1,
            batch_sequence=number,
            create_time_ms=self.world.now,
            flags=BatchFlag.ORDERED if subject == ORDERED else 0,
        )
        append_ms = await master.send(region)
        for at, wish in enumerate(wishes):
            wish.is_acked = True
            if self.world.now + 1_000 <= min(wish.due_times_ms):
                self.in_time.add(wish.number)
            if subject == PLAIN and self.random.random() < 0.25:
                delayed = DelayedId(
                    MessageId(1, number, at), min(wish.due_times_ms), append_ms, "d1"
                )
                for _ in range(self.random.choice((1, 1, 2))):
                    self.world.after(self.random.randrange(20_000), self._change, wish, delayed)

    def _wish(self, place: int) -> Wish:
        due_ms = max(self.world.now + self.random.choice(DELAYS_MS) + self.random.randrange(700), 0)
        number = self._number * 100 + place
        wish = self.wishes[number] = Wish(number, self.random.randrange(4), {due_ms})
        return wish

    def _change(self, wish: Wish, delayed: DelayedId) -> None:
        master = self.group.cut_off or self.group.master
        if master is None:
            return
        master.loop.create_task(
            (self._cancel if self.random.random() < 0.5 else self._move)(master, wish, delayed)
        )
        for _ in range(2):
            self.world.after(self.random.randrange(300), self._look, wish, delayed)

    def _look(self, wish: Wish, delayed: DelayedId) -> None:
        master = self.group.cut_off or self.group.master
        if master is not None:
            master.loop.create_task(self._show(master, wish, delayed))

    async def _show(self, master: SimMaster, wish: Wish, delayed: DelayedId) -> None:
        """Somebody decides by what is shown: what is cancelled stays so."""
        with suppress(MessageNotFound):
            _, state = await master.admin.show(delayed)
            wish.is_cancelled = wish.is_cancelled or state == "cancelled"

    async def _cancel(self, master: SimMaster, wish: Wish, delayed: DelayedId) -> None:
        before, wish.may_be_cancelled = wish.may_be_cancelled, True
        try:
            await master.admin.cancel(delayed)
            wish.is_cancelled = True
        except (TooLate, MessageNotFound):
            wish.may_be_cancelled = before

    async def _move(self, master: SimMaster, wish: Wish, delayed: DelayedId) -> None:
        before, due_ms = set(wish.due_times_ms), self.world.now + self.random.randrange(90_000)
        wish.due_times_ms.add(due_ms)
        try:
            await master.admin.move(delayed, due_ms)
            wish.due_times_ms, wish.may_be_cancelled = {due_ms}, False
        except (TooLate, MessageNotFound):
            wish.due_times_ms = before

    async def _send_recurring(self, master: SimMaster) -> None:
        self._number += 1
        number = self._number
        headers = {CRON: self.random.choice((b"* * * * *", b"*/2 * * * *")), ZONE: b"Europe/Berlin"}
        _, region = encode(
            PLAIN.encode(),
            Columns([b"run"], headers=[headers], due_times_ms=[self.world.now]),
            producer_id=1,
            batch_sequence=number,
            create_time_ms=self.world.now,
            flags=BatchFlag.RECURRING,
        )
        append_ms = await master.send(region)
        first = MessageId(1, number, 0)
        self.recurring[str(first)] = self.world.now
        if self.random.random() < 0.5:
            self.world.after(
                self.random.randrange(300_000),
                self._stop,
                DelayedId(first, self.world.now, append_ms, "d1"),
            )
        for _ in range(3):
            self.world.after(
                self.random.randrange(100_000),
                self._move_run,
                DelayedId(first, self.world.now, append_ms, "d1"),
            )

    def _move_run(self, delayed: DelayedId) -> None:
        if self.group.master is not None and not self.is_calm:
            self.group.master.loop.create_task(self._move_next_run(self.group.master, delayed))

    async def _move_next_run(self, master: SimMaster, delayed: DelayedId) -> None:
        with suppress(TooLate, MessageNotFound):
            await master.admin.move(delayed, self.world.now + self.random.randrange(200_000))

    def _stop(self, delayed: DelayedId) -> None:
        if self.group.master is not None:
            self.group.master.loop.create_task(self._stop_recurring(self.group.master, delayed))

    async def _stop_recurring(self, master: SimMaster, delayed: DelayedId) -> None:
        first = str(delayed.message_id)
        began_ms = self.recurring.pop(first)  # until the answer nobody knows
        await master.admin.cancel(delayed)
        self.recurring[first], self.stopped[first] = began_ms, self.world.now

    # --- faults -----------------------------------------------------------------------------------

    def _nemesis(self) -> None:
        if self.is_calm:
            return
        what = self.random.random()
        master = self.group.master
        if master is None:
            self.group.elect()
        elif what < 0.25:
            self.group.lose(cut_off=self.random.random() < 0.3)
            if self.random.random() < 0.1:
                self.world.after(self.random.randrange(60_000, 200_000), self._nemesis)  # a day off
                return
        elif what < 0.5:
            master.take_checkpoint()
        elif what < 0.6:
            self.real_time.is_away = not self.real_time.is_away
        self.world.after(self.random.choice((20, 200, 1_000, 4_000)) + 1, self._nemesis)

    # --- judgement --------------------------------------------------------------------------------

    def _judged(self) -> Result:
        if RAISED:
            raise RAISED[0]
        runs = [
            (
                first_id(message),
                planned_ms(message.headers.get(PLANNED, b""), message.due_ms),
                message.due_ms,
                at,
            )
            for _, message, at in self.real_time.stored
            if SCHEDULE_ID in message.headers
        ]
        stored = [
            (subject, message, at)
            for subject, message, at in self.real_time.stored
            if SCHEDULE_ID not in message.headers
        ]
        sights = [
            Sight(int(message.body), subject, at, when)
            for at, (subject, message, when) in enumerate(stored)
        ]
        verdict = judge(self.wishes.values(), sights)
        anomalies = verdict.anomalies + out_of_order(
            [wish for wish in self.wishes.values() if wish.number in self.in_time],
            [each for each in sights if each.queue == ORDERED],
        )
        anomalies += self._judge_runs(runs)
        if anomalies:
            raise Violation(f"{len(anomalies)}: " + "; ".join(anomalies[:5]))
        return Result(
            self.seed,
            len(self.wishes),
            verdict.delivered,
            verdict.cancelled,
            len(runs),
            self.group.lives,
        )

    def _judge_runs(self, runs: list[tuple[str, int, int, int]]) -> Iterator[str]:
        """`runs` are (first id, time by the schedule, due time, when it came): moved runs are due
        at another time.
        """
        counts = Counter((first, at_ms) for first, at_ms, _, _ in runs)
        for (first, at_ms), count in counts.items():
            if count > 1:
                yield f"the run of {first} at {at_ms} came {count} times"
        for first, _, due_ms, at in runs:
            if due_ms > self.stopped.get(first, due_ms):
                yield (
                    f"the run of {first} at {due_ms} came, and it was cancelled at "
                    f"{self.stopped[first]}"
                )
            if at < due_ms:
                yield f"the run of {first} at {due_ms} came early, at {at}"
        for first, began_ms in self.recurring.items():
            due_times_ms = sorted(due_ms for each, due_ms in counts if each == first)
            end_ms = self.stopped.get(first, self.world.now - 2_000)
            gaps = {b - a for a, b in pairwise(due_times_ms)}
            if len(gaps) > 1:
                yield f"runs of {first} are missing: {gaps}"
            step_ms = min(gaps, default=2 * MINUTE_MS)
            if (
                due_times_ms
                and due_times_ms[-1] + step_ms < end_ms - 1_000
                and first not in self.stopped
            ):
                yield f"{first} came last at {due_times_ms[-1]}, and it is {self.world.now}"
            if not due_times_ms and end_ms - began_ms > 3 * MINUTE_MS and first not in self.stopped:
                yield f"{first} never came"


@contextmanager
def _memory_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="delaysim-", dir=_MEMORY if _MEMORY.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def simulate(seed: int, minutes: int = 12, folder: Path | None = None) -> Result:
    """Run one seed. `failure` describes a violated property."""
    with own_violations(), nullcontext(folder) if folder is not None else _memory_folder() as where:
        simulation = Simulation(seed, where)
        try:
            return simulation.run(minutes)
        except (Violation, AssertionError) as failure:
            return Result(seed, failure=f"seed {seed}: {failure}")
        finally:
            asyncio._set_running_loop(None)
            if simulation.group.master is not None:
                simulation.group.graveyard += simulation.group.master.loop.kill()
            bury(simulation.group.graveyard)


if __name__ == "__main__":
    print(simulate(int(sys.argv[1])))
