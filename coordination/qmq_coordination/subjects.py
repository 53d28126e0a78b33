"""Which subjects exist, with their settings: `/qmq/subjects/NAME`, JSON of `SubjectConfig`. Created by compare-and-swap, so once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from qmq.errors import Compacted, SubjectExists, UnknownSubject
from qmq.model import SubjectConfig, check_name
from qmq_coordination.store import CoordinationStore, KeyValue, Put, absent, unchanged

PREFIX: Final = "/qmq/subjects/"


def _encode(config: SubjectConfig) -> bytes:
    return json.dumps(asdict(config), sort_keys=True).encode()


def _decode(item: KeyValue) -> SubjectConfig:
    return SubjectConfig(**json.loads(item.value))


class SubjectCatalog:
    """Subjects in the coordination store."""

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store

    async def create(self, config: SubjectConfig) -> SubjectConfig:
        """Create a subject; one that is there with the same settings is fine. Raises SubjectExists."""
        key = PREFIX + config.name
        done = await self._store.txn([absent(key)], [Put(key, _encode(config))])
        if not done.succeeded:
            found = await self.get(config.name)
            if found is not None and found != config:
                raise SubjectExists(
                    f"subject {config.name!r} is there with other settings: {found}; alter it, or choose another name"
                )
        return config

    async def get(self, name: str) -> SubjectConfig | None:
        """The subject's settings, if it exists. Raises InvalidName."""
        found = await self._store.get(PREFIX + check_name("subject", name))
        return None if found is None else _decode(found)

    async def list(self, prefix: str = "") -> list[SubjectConfig]:
        """All subjects that begin with `prefix`, in order."""
        return [_decode(item) for item in (await self._store.list(PREFIX + prefix)).items]

    async def alter(self, config: SubjectConfig) -> SubjectConfig:
        """Replace a subject's settings. Raises UnknownSubject."""
        key = PREFIX + config.name
        while True:
            found = await self._store.get(key)
            if found is None:
                raise UnknownSubject(f"there is no subject {config.name!r}")
            if (await self._store.txn([unchanged(found)], [Put(key, _encode(config))])).succeeded:
                return config


class SubjectCache:
    """All subjects in memory, kept up to date by a watch: for the broker, which asks for each message's subject."""

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store
        self._subjects: dict[str, SubjectConfig] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called after a subject changed."""
        self._task: asyncio.Task[None] | None = None

    def look_up(self, name: str) -> SubjectConfig | None:
        """The subject's settings, if it is known here."""
        return self._subjects.get(name)

    async def start(self) -> None:
        """Load all subjects, then follow."""
        revision = await self._load()
        self._task = asyncio.create_task(self._follow(revision + 1))

    async def _load(self) -> int:
        listing = await self._store.list(PREFIX)
        self._subjects = {item.key[len(PREFIX) :]: _decode(item) for item in listing.items}
        return listing.revision

    async def _follow(self, revision: int) -> None:
        while True:
            try:
                async for changes in self._store.watch(PREFIX, revision):
                    revision = changes.revision + 1
                    for event in changes.events:
                        name = event.key[len(PREFIX) :]
                        if event.now is None:
                            self._subjects.pop(name, None)
                        else:
                            self._subjects[name] = _decode(event.now)
                    self.on_change()
                return
            except Compacted:
                revision = await self._load() + 1
                self.on_change()

    async def refresh(self) -> None:
        """Read everything again: a watch is a hint, and may be late."""
        await self._load()

    async def stop(self) -> None:
        """Follow no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
