"""A message log with sealed segments, and an object store with faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import obstore.store

from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.tiering.object_store import Objects, StoreAway
from support import ManualClock, intake

CHUNK_BYTES = 10_000
CONFIG = LogConfig(segment_bytes=64 * KIB)


def grow(store: Store, batches: int, seed: int = 1) -> None:
    """Append batches of 16 KiB; four of them fill a segment."""
    random, queue = Random(seed), store.open_queue("s", 0)
    for _ in range(batches):
        store.append([intake(queue, [random.randbytes(16 * KIB - 500)], number=queue.next_sequence)])
    store.commit(store.index)


@contextmanager
def log_at(folder: Path, batches: int = 13, seed: int = 1) -> Iterator[Store]:
    """A store with three or four sealed segments, all of it committed."""
    store = open_store(folder, CONFIG, ManualClock())
    grow(store, batches, seed)
    try:
        yield store
    finally:
        store.close()


def in_memory() -> Objects:
    """An object store in this process."""
    return Objects(obstore.store.MemoryStore())


class FaultyObjects:
    """An object store that fails as `faults` says, by the number of the call; the first call is 1."""

    def __init__(self, inner: Objects, fails: Callable[[int], bool] = lambda _: False, *, loses_answers: bool = False) -> None:
        self.inner = inner
        self.fails = fails
        self.loses_answers = loses_answers
        """Whether a call that fails has done its work all the same."""
        self.calls = 0
        self.names: list[tuple[str, str]] = []
        """(method, name) of each call."""

    def create(self, name: str, data: bytes) -> bool:
        found: bool = self._call("create", name, data)
        return found

    def get(self, name: str) -> bytes | None:
        found: bytes | None = self._call("get", name)
        return found

    def delete(self, name: str) -> None:
        self._call("delete", name)

    def _call(self, method: str, name: str, *data: bytes) -> Any:
        self.calls += 1
        self.names.append((method, name))
        fails = self.fails(self.calls)
        if fails and not self.loses_answers:
            raise StoreAway(f"{method} {name} failed (in this test)")
        result = getattr(self.inner, method)(name, *data)
        if fails:
            raise StoreAway(f"the answer to {method} {name} was lost (in this test)")
        return result
