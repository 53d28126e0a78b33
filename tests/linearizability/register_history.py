"""Concurrent clients that read and write registers of a coordination store, and the history of
their calls.

Concurrent clients that change routes and reset groups of a running cluster, and the history of
their calls.

    route   a register whose value is the latest version; a change `from_version` is a
            compare-and-swap on it
    group   a register whose value is the group's position; a reset sets it, and answers where the
            group was

A route that another client changed first is refused without its version, so a refusal proves
nothing and is left out. So does a call that certainly changed nothing. A call of unknown outcome
may have been done at any moment since, or never.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Final

from qmq_coordination.coordination_store import (
    Compare,
    CompareTarget,
    CoordinationStore,
    Get,
    Put,
    absent,
)
from support import needs

import qmq
from qmq.errors import (
    CoordinationUnavailable,
    CoordinationUnknown,
    InvalidArgument,
    Outcome,
    QmqError,
    RouteConflict,
)
from qmq.model import SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

JUDGE: Final = needs.CACHE / "judges" / "linearizability"
OPERATIONS: Final = 6
"""Calls of each client on each register. The time of a check grows with the number of concurrent
calls.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One call and its answer. `unknown`: it had no answer, and may have been done at any moment
    since, or never.
    """

    key: str
    client: int
    kind: str
    old: str = ""
    new: str = ""
    found: str = ""
    done: bool = False
    unknown: bool = False
    call_ns: int = 0
    return_ns: int = 0


class Client:
    """One client with its connection. Its calls are drawn from `random`."""

    def __init__(
        self, number: int, store: CoordinationStore, random: Random, history: list[Call]
    ) -> None:
        self._number = number
        self._store = store
        self._random = random
        self._history = history
        self._writes = 0
        self._seen = ""

    async def use(self, key: str) -> None:
        """Make some calls on a register, and record them."""
        self._seen = ""
        for _ in range(OPERATIONS):
            await self._call(key)

    async def _call(self, key: str) -> None:
        self._writes += 1
        new = f"{self._number}.{self._writes}"
        swap = ("swap", self._swap)
        kind, act = self._random.choice(
            [("get", self._get), ("put", self._put), swap, swap, ("delete", self._delete)]
        )
        call = Call(
            key,
            self._number,
            kind,
            old=self._seen if kind == "swap" else "",
            new=new if kind in ("put", "swap") else "",
        )
        begun_ns = time.monotonic_ns()
        try:
            answered = await act(call)
        except CoordinationUnavailable:
            return  # nothing was changed: if something was, the others' answers show it
        except CoordinationUnknown:
            answered = replace(call, unknown=True)
        if not answered.unknown and kind in ("get", "swap"):
            self._seen = answered.new if answered.done else answered.found
        self._history.append(replace(answered, call_ns=begun_ns, return_ns=time.monotonic_ns()))

    async def _get(self, call: Call) -> Call:
        item = await self._store.get(call.key)
        return replace(call, found="" if item is None else item.value.decode())

    async def _put(self, call: Call) -> Call:
        await self._store.put(call.key, call.new.encode())
        return replace(call, done=True)

    async def _delete(self, call: Call) -> Call:
        return replace(call, done=await self._store.delete(call.key) > 0)

    async def _swap(self, call: Call) -> Call:
        held = (
            Compare(call.key, CompareTarget.VALUE, "=", call.old.encode())
            if call.old
            else absent(call.key)
        )
        result = await self._store.txn([held], [Put(call.key, call.new.encode())], [Get(call.key)])
        found = (
            "" if result.succeeded or not result.results[0] else result.results[0][0].value.decode()
        )
        return replace(call, done=result.succeeded, found=found)


async def histories_of(
    stores: Sequence[CoordinationStore],
    registers: int,
    random: Random,
    disturb: Callable[[], Awaitable[None]] | None = None,
) -> list[Call]:
    """One client for each store uses the registers, one register after another and all clients
    concurrently on each. `disturb` is awaited before each register.
    """
    history: list[Call] = []
    clients = [
        Client(number, store, Random(random.random()), history)
        for number, store in enumerate(stores)
    ]
    for number in range(registers):
        if disturb is not None:
            await disturb()
        await asyncio.gather(*(client.use(f"register/{number}") for client in clients))
    return history


def judged(history: Sequence[Call], folder: Path) -> tuple[int, str]:
    """The judge's exit code (1: some history is not linearizable) and what it printed. Pictures are
    in the folder.
    """
    path = folder / "history.jsonl"
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in history))
    done = subprocess.run(
        [str(JUDGE), str(path), str(folder)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


MESSAGES: Final = 100
SOON: Final = timedelta(seconds=20)
RESETS: Final = 5
"""The calls of each client on each group."""
CHANGES: Final = 3
LOGICAL: Final = 256


class RouteClient:
    """Splits partitions of a route, from the version that it has seen last."""

    def __init__(self, number: int, mq: qmq.Client, random: Random, history: list[Call]) -> None:
        self._number = number
        self._mq = mq
        self._random = random
        self._history = history

    async def use(self, subject: str) -> None:
        """Make some changes, and record them."""
        for _ in range(CHANGES):
            described = await self._described(subject)
            version, parts = described.latest_version, list(described.route.partitions)
            part = self._random.choice(parts)
            if part.lps.end - part.lps.first < 2:
                continue
            split = pb.SplitOperation(
                partition=part.number, at=[(part.lps.first + part.lps.end) // 2]
            )
            call = Call(
                subject,
                self._number,
                "swap",
                old=str(version),
                new=str(version + 1),
                done=True,
                call_ns=time.monotonic_ns(),
            )
            try:
                made = await self._mq.metadata.change_route(
                    subject, split=split, from_version=version
                )
            except RouteConflict:
                continue
            except QmqError as failure:
                call = replace(call, unknown=True, done=False)
                if failure.outcome is Outcome.NOT_STORED and isinstance(failure, InvalidArgument):
                    continue
            else:
                assert made.change.to_version == version + 1
            self._history.append(replace(call, return_ns=time.monotonic_ns()))

    async def _described(self, subject: str) -> pb.DescribeRouteResponse:
        while True:
            try:
                return await self._mq.metadata.describe_route(subject)
            except QmqError:
                await asyncio.sleep(0.02)


class GroupClient:
    """Resets groups to sequences that no other call names."""

    def __init__(self, number: int, mq: qmq.Client, subject: str, history: list[Call]) -> None:
        self._number = number
        self._mq = mq
        self._subject = subject
        self._history = history

    async def use(self, group: str) -> None:
        """Make some resets, and record them."""
        for turn in range(RESETS):
            sequence = 2 + self._number * RESETS + turn
            call = Call(
                group, self._number, "exchange", new=str(sequence), call_ns=time.monotonic_ns()
            )
            try:
                (moved,) = await self._mq.metadata.reset_group(
                    self._subject, group, sequence=sequence
                )
            except QmqError as failure:
                if failure.outcome is Outcome.NOT_STORED:
                    continue
                call = replace(call, unknown=True)
            else:
                call = replace(call, done=True, found=str(moved.from_sequence))
            self._history.append(replace(call, return_ns=time.monotonic_ns()))


async def route_histories(
    clients: list[qmq.Client],
    count: int,
    random: Random,
    disturb: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
) -> list[Call]:
    """The clients change `count` routes, one route after another and all clients concurrently on
    each. `disturb` runs meanwhile.
    """
    history: list[Call] = []
    users = [RouteClient(number, mq, random, history) for number, mq in enumerate(clients)]
    for number in range(count):
        subject = f"route-{number}"
        config = SubjectConfig(subject, order=qmq.Order.STRICT, logical_partitions=LOGICAL)
        await clients[0].metadata.create_subject(config, partitions=1)
        history.append(
            Call(subject, len(clients), "put", new="1", done=True, return_ns=time.monotonic_ns())
        )
        await asyncio.gather(disturb(), *(each.use(subject) for each in users))
    return history


async def group_histories(
    clients: list[qmq.Client],
    count: int,
    disturb: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
) -> list[Call]:
    """The clients reset `count` groups of a subject, one group after another and all clients
    concurrently on each. `disturb` runs meanwhile.
    """
    history: list[Call] = []
    users = [GroupClient(number, mq, "orders", history) for number, mq in enumerate(clients)]
    await clients[0].send_many("orders", [b"%d" % number for number in range(MESSAGES)])
    for number in range(count):
        group = f"group-{number}"
        await begin_at_one(clients[0], group)
        history.append(
            Call(group, len(clients), "put", new="1", done=True, return_ns=time.monotonic_ns())
        )
        await asyncio.gather(disturb(), *(each.use(group) for each in users))
    return history


async def begin_at_one(mq: qmq.Client, group: str) -> None:
    """Make the group, at sequence 1."""
    while True:
        with suppress(QmqError):
            async with mq.consumer("orders", group, ack="explicit") as consumer:
                await (await consumer.pull(1, SOON)).ack_sync()
            await mq.metadata.reset_group("orders", group, sequence=1)
            return
