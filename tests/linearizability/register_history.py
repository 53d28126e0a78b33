"""Concurrent clients that read and write registers of a coordination store, and the history of their calls."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from qmq_coordination.coordination_store import Compare, CompareTarget, CoordinationStore, Get, Put, absent
from support import needs

from qmq.errors import CoordinationUnavailable, CoordinationUnknown

JUDGE: Final = needs.CACHE / "judges" / "linearizability"
OPERATIONS: Final = 6
"""Calls of each client on each register. The time of a check grows with the number of concurrent calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call and its answer. `unknown`: it had no answer, and may have been done at any moment since, or never."""

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

    def __init__(self, number: int, store: CoordinationStore, random: Random, history: list[Call]) -> None:
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
        kind, act = self._random.choice([("get", self._get), ("put", self._put), swap, swap, ("delete", self._delete)])
        call = Call(key, self._number, kind, old=self._seen if kind == "swap" else "", new=new if kind in ("put", "swap") else "")
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
        held = Compare(call.key, CompareTarget.VALUE, "=", call.old.encode()) if call.old else absent(call.key)
        result = await self._store.txn([held], [Put(call.key, call.new.encode())], [Get(call.key)])
        found = "" if result.succeeded or not result.results[0] else result.results[0][0].value.decode()
        return replace(call, done=result.succeeded, found=found)


async def histories_of(
    stores: Sequence[CoordinationStore], registers: int, random: Random, disturb: Callable[[], Awaitable[None]] | None = None
) -> list[Call]:
    """One client for each store uses the registers, one register after another and all clients concurrently on each. `disturb` is awaited
    before each register.
    """
    history: list[Call] = []
    clients = [Client(number, store, Random(random.random()), history) for number, store in enumerate(stores)]
    for number in range(registers):
        if disturb is not None:
            await disturb()
        await asyncio.gather(*(client.use(f"register/{number}") for client in clients))
    return history


def judged(history: Sequence[Call], folder: Path) -> tuple[int, str]:
    """The judge's exit code (1: some history is not linearizable) and what it printed. Pictures are in the folder."""
    path = folder / "history.jsonl"
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in history))
    done = subprocess.run([str(JUDGE), str(path), str(folder)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
