"""Load of delayed messages for fault tests: senders that cancel and move some of their messages,
and consumers that record all deliveries.

A message's body is its number. Half of the messages go to an unordered subject, the other half,
with keys, to an ordered one. Unknown outcomes are recorded as unknown.

Judges delayed messages by what senders, cancellers and consumers saw. Pure.

A *wish* is one message as its sender knows it; a *sight* is one stored copy of it in its subject.
The model: each wish that was acknowledged and not cancelled has exactly one sight, not before its
due time; a cancelled wish has none; a wish of unknown outcome has at most one.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Final, NamedTuple

from support import eventually

import qmq
from qmq.errors import MessageNotFound, Outcome, QmqError, TooLate
from qmq.model import Order, SubjectConfig


@dataclass(slots=True)
class Wish:
    """A message that was sent. `due_times_ms` are its possible due times: several while the outcome
    of a move is unknown.
    """

    number: int
    key: int
    due_times_ms: set[int]
    is_acked: bool = False
    is_refused: bool = False
    """It is certain that it was not stored."""
    is_cancelled: bool = False
    may_be_cancelled: bool = False
    """The answer to a cancel was lost, for good."""


class Sight(NamedTuple):
    """A stored copy: where, and when the real-time broker stored it."""

    number: int
    queue: str
    sequence: int
    append_ms: int


@dataclass(slots=True)
class Verdict:
    """Anomalies, and the delays of the other messages."""

    anomalies: list[str] = field(default_factory=list)
    lateness_ms: list[int] = field(default_factory=list)
    delivered: int = 0
    cancelled: int = 0

    def object_to(self, text: str) -> None:
        """Something is wrong."""
        self.anomalies.append(text)


def judge(wishes: Iterable[Wish], sights: Iterable[Sight], *, early_ms: int = 0) -> Verdict:
    """Compare. `early_ms`: how far the clocks of the delay group and of the real-time brokers may
    differ.
    """
    verdict = Verdict()
    seen: dict[int, dict[tuple[str, int], Sight]] = defaultdict(dict)
    for sight in sights:
        seen[sight.number][sight.queue, sight.sequence] = sight
    known = {wish.number: wish for wish in wishes}
    for number in seen.keys() - known.keys():
        verdict.object_to(f"{number} was never sent, and came: {list(seen[number])}")
    for wish in known.values():
        _judge_one(verdict, wish, list(seen[wish.number].values()), early_ms)
    return verdict


def _judge_one(verdict: Verdict, wish: Wish, copies: list[Sight], early_ms: int) -> None:
    name = f"{wish.number} (due {sorted(wish.due_times_ms)})"
    if len(copies) > 1:
        verdict.object_to(
            f"{name} came {len(copies)} times: {[(each.queue, each.sequence) for each in copies]}"
        )
    if wish.is_cancelled:
        verdict.cancelled += 1
        if copies:
            verdict.object_to(f"{name} was cancelled, and came")
        return
    if not copies:
        if wish.is_acked and not wish.may_be_cancelled:
            verdict.object_to(f"{name} was acknowledged, and never came")
        return
    if wish.is_refused:
        verdict.object_to(f"{name} was refused, and came")
    verdict.delivered += 1
    late_ms = copies[0].append_ms - min(wish.due_times_ms)
    if late_ms < -early_ms:
        verdict.object_to(f"{name} came {-late_ms} ms early")
    if len(wish.due_times_ms) == 1:
        verdict.lateness_ms.append(late_ms)


def out_of_order(wishes: Iterable[Wish], sights: Iterable[Sight]) -> list[str]:
    """On an ordered subject: where a message came behind one of its key that was due later, or at
    the same time and sent later.

    `sights` are in the order in which a group consumed them; senders number in the order of
    sending, and send well before what is due.
    """
    known = {wish.number: wish for wish in wishes if len(wish.due_times_ms) == 1}
    found: list[str] = []
    last: dict[int, tuple[int, int]] = {}
    done: set[int] = set()
    for sight in sights:
        wish = known.get(sight.number)
        if wish is None or sight.number in done:
            continue
        done.add(sight.number)
        (due,) = wish.due_times_ms
        mine, before = (due, wish.number), last.get(wish.key, (-1, -1))
        if mine < before:
            found.append(
                f"key {wish.key}: {wish.number} (due {due}) came behind {before[1]} (due "
                f"{before[0]})"
            )
        last[wish.key] = max(mine, before)
    return found


PLAIN: Final = "plain"
ORDERED: Final = "ordered"
KEYS: Final = 16
DELAYS_S: Final = (0.0, 0.3, 1.0, 2.5, 4.0, 8.0)
MANY: Final = 20


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class DelayWorkload:
    """`start`, faults, `finish`."""

    def __init__(
        self,
        server: str,
        seed: int,
        tls: qmq.Tls | None = None,
        *,
        pause_s: float = 0.02,
        delays_s: tuple[float, ...] = DELAYS_S,
    ) -> None:
        self.wishes: dict[int, Wish] = {}
        self.in_time: set[int] = set()
        """Acknowledged a second before they were due: order is promised for these."""
        self.sights: dict[str, list[Sight]] = {PLAIN: [], ORDERED: []}
        self._server, self._tls = server, tls
        self._random = Random(seed)
        self._pause_s = pause_s
        self._delays_s = delays_s
        self._next = 0
        self._stops = asyncio.Event()
        self._clients: list[qmq.Client] = []
        self._sending: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []

    def _client(self) -> qmq.Client:
        client = qmq.connect(self._server, tls=self._tls)
        self._clients.append(client)
        return client

    async def start(self) -> None:
        """Begin."""
        client = self._client()
        await client.metadata.create_subject(SubjectConfig(PLAIN))
        await client.metadata.create_subject(
            SubjectConfig(ORDERED, order=Order.STRICT, logical_partitions=64), partitions=2
        )
        self._consuming = [
            asyncio.create_task(self._see_plain(client)),
            asyncio.create_task(self._see_ordered(client)),
        ]
        self._sending = [
            asyncio.create_task(self._send_forever(self._client(), subject))
            for subject in (PLAIN, ORDERED)
        ]

    # --- sending ----------------------------------------------------------------------------------

    async def _send_forever(self, client: qmq.Client, subject: str) -> None:
        asked: set[asyncio.Task[None]] = set()
        while not self._stops.is_set():
            sent = await self._send(client, subject, MANY if self._random.random() < 0.3 else 1)
            for wish, delayed_id in sent:
                # what moves has no one due time, and so no order
                if delayed_id and self._random.random() < 0.2 and subject == PLAIN:
                    change = self._cancel if self._random.random() < 0.5 else self._move
                    asked.add(asyncio.create_task(change(client, wish, delayed_id)))
            asked = {task for task in asked if not task.done()}
            await asyncio.sleep(self._pause_s)
        await asyncio.gather(*asked)

    async def _send(
        self, client: qmq.Client, subject: str, count: int
    ) -> list[tuple[Wish, str | None]]:
        wishes = [self._wish() for _ in range(count)]
        bodies = [str(wish.number).encode() for wish in wishes]
        ats = [datetime.fromtimestamp(min(wish.due_times_ms) / 1000, UTC) for wish in wishes]
        keys = [f"k{wish.key}" for wish in wishes] if subject == ORDERED else None
        try:
            if count == 1:
                ids = [
                    (
                        await client.send(
                            subject, bodies[0], key=keys[0] if keys else None, at=ats[0]
                        )
                    ).delayed_id
                ]
            else:
                ids = [
                    each.delayed_id
                    for each in await client.send_many(subject, bodies, keys=keys, ats=ats)
                ]
        except QmqError as failure:
            for wish in wishes:
                # of many, some batch may be stored
                wish.is_refused = failure.outcome is Outcome.NOT_STORED and count == 1
            return []
        acked_ms = _now_ms()
        for wish in wishes:
            wish.is_acked = True
            if acked_ms + 1_000 <= min(wish.due_times_ms):
                self.in_time.add(wish.number)
        return list(zip(wishes, ids, strict=True))

    def _wish(self) -> Wish:
        self._next += 1
        due_ms = (
            _now_ms()
            + int(self._random.choice(self._delays_s) * 1000)
            + self._random.randrange(500)
        )
        wish = self.wishes[self._next] = Wish(self._next, self._random.randrange(KEYS), {due_ms})
        return wish

    # --- changing one's mind ----------------------------------------------------------------------

    async def _cancel(self, client: qmq.Client, wish: Wish, delayed_id: str) -> None:
        await asyncio.sleep(self._random.random())
        try:
            await client.delayed.cancel(delayed_id)
            wish.is_cancelled = True
        except (TooLate, MessageNotFound):
            pass
        except QmqError as failure:
            wish.may_be_cancelled = failure.outcome is not Outcome.NOT_STORED

    async def _move(self, client: qmq.Client, wish: Wish, delayed_id: str) -> None:
        await asyncio.sleep(self._random.random())
        due_ms = _now_ms() + 1_000 + self._random.randrange(4_000)
        before = set(wish.due_times_ms)
        wish.due_times_ms.add(due_ms)
        try:
            await client.delayed.move(delayed_id, datetime.fromtimestamp(due_ms / 1000, UTC))
            wish.due_times_ms = {due_ms}
        except QmqError as failure:  # too late, most often
            if failure.outcome is Outcome.NOT_STORED:
                wish.due_times_ms = before

    # --- seeing -----------------------------------------------------------------------------------

    async def _see_plain(self, client: qmq.Client) -> None:
        async with client.consumer(PLAIN, "judge") as consumer:
            while True:
                with suppress(QmqError):
                    async for message in consumer:
                        self._saw(
                            PLAIN,
                            message.body,
                            message.broker_group,
                            message.sequence,
                            message.append_time_ms,
                        )

    async def _see_ordered(self, client: qmq.Client) -> None:
        async with client.ordered_consumer(ORDERED, "judge") as consumer:
            while True:
                with suppress(QmqError):
                    async for message in consumer:
                        queue = f"{message.broker_group}/{message.partition}"
                        self._saw(
                            ORDERED, message.body, queue, message.sequence, message.append_time_ms
                        )

    def _saw(self, subject: str, body: bytes, queue: str, sequence: int, append_ms: int) -> None:
        self.sights[subject].append(Sight(int(body), f"{subject}@{queue}", sequence, append_ms))

    # --- the end ----------------------------------------------------------------------------------

    @property
    def missing(self) -> int:
        """Acknowledged, not cancelled, not seen."""
        seen = {sight.number for sights in self.sights.values() for sight in sights}
        wishes = [
            wish
            for wish in self.wishes.values()
            if wish.is_acked and not wish.is_cancelled and not wish.may_be_cancelled
        ]
        return sum(wish.number not in seen for wish in wishes)

    async def finish(self, *, within_s: float = 240.0) -> None:
        """Stop sending; wait for the messages that must be delivered, and a while longer for those
        that must not.
        """
        self._stops.set()
        await asyncio.gather(*self._sending)
        last_ms = max((max(wish.due_times_ms) for wish in self.wishes.values()), default=0)
        await asyncio.sleep(max(last_ms - _now_ms(), 0) / 1000)
        with suppress(TimeoutError):
            await eventually(lambda: not self.missing, within_s=within_s, look_s=0.1)
        await asyncio.sleep(2.0)
        await self.close()

    async def close(self) -> None:
        """End it all."""
        for task in (*self._sending, *self._consuming):
            task.cancel()
        await asyncio.gather(*self._sending, *self._consuming, return_exceptions=True)
        for client in self._clients:
            await client.close()
