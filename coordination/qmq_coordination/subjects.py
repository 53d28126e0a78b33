"""The subjects, their settings and their schemas in the coordination store. A compare-and-swap creates each subject once.

    /qmq/subjects/NAME    SubjectConfig, JSON: a subject's settings
        removed by the deletion of the subject
    /qmq/schemas/SUBJECT/NUMBER    DeclaredSchema, JSON: a version of a subject's schema
        removed by the operator, all versions together; the deletion of the subject

Creating an existing subject with the same settings succeeds, with any placement: if two metaservers create and place it at the same moment,
the first placement wins, and both answer with it.

After a lost answer, the catalog reads the key again and repeats the change: each change is a compare-and-swap to the wanted state.

Versions of schemas are never changed, and are deleted together (qmq/meta/catalog.py writes them).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, fields, replace
from enum import Enum
from typing import Final

from qmq.errors import CoordinationUnknown, SubjectExists, UnknownSubject
from qmq.model import Fencing, Order, SubjectConfig, SubjectFlush, check_name
from qmq_coordination.coordination_store import CoordinationStore, KeyValue, Put, absent, unchanged

PREFIX: Final = "/qmq/subjects/"
PAUSE_S: Final = 0.1
"""Pause before reading back a change with unknown outcome, to spare a slow store."""
_KNOWN: Final = frozenset(each.name for each in fields(SubjectConfig))
_DELETING: Final = "is_deleting"
_TUPLES: Final = ("groups", "former_groups")


def subject_key(name: str) -> str:
    """The key of a subject. Raises InvalidName."""
    return PREFIX + check_name("subject", name)


def encode_subject(config: SubjectConfig) -> bytes:
    found = {name: value.value if isinstance(value, Enum) else value for name, value in asdict(config).items()}
    return json.dumps(found, sort_keys=True).encode()


def decode_subject(item: KeyValue) -> SubjectConfig:
    """Decode a subject. Older releases wrote fewer fields, newer ones may write more."""
    found = {name: value for name, value in json.loads(item.value).items() if name in _KNOWN}
    enums = {
        "order": Order(found.get("order", "")),
        "fencing": Fencing(found.get("fencing", "lease")),
        "flush": SubjectFlush(found.get("flush", "default")),
    }
    return SubjectConfig(**{**found, **{name: tuple(found.get(name, ())) for name in _TUPLES}, **enums})


def is_deleting(item: KeyValue) -> bool:
    """True if the subject is being deleted (docs/DELETION.md). All other operations then treat it as unknown."""
    return bool(json.loads(item.value).get(_DELETING))


def _going(name: str) -> UnknownSubject:
    return UnknownSubject(f"subject {name!r} is being deleted: wait until that is done, then create it again")


class SubjectCatalog:
    """Subjects in the coordination store."""

    def __init__(self, store: CoordinationStore, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._store = store
        self._sleep = sleep

    async def create(self, config: SubjectConfig, *, is_placed: bool = False, also: Sequence[Put] = ()) -> SubjectConfig:
        """Create a subject, or return the existing one if it has the same settings.

        `is_placed`: the caller chose the broker groups, so they count as settings. `also` is put in the same transaction (for example, an
        ordered subject's first route). Raises SubjectExists, UnknownSubject (a subject of that name is being deleted),
        CoordinationUnavailable.
        """
        key = subject_key(config.name)
        while True:
            try:
                if (await self._store.txn([absent(key)], [Put(key, encode_subject(config)), *also])).succeeded:
                    return config
            except CoordinationUnknown:
                await self._sleep(PAUSE_S)  # if the change was made, the comparison fails and the record is ours
                continue
            item = await self._store.get(key)
            if item is None:
                continue
            if is_deleting(item):
                raise _going(config.name)
            found = decode_subject(item)
            if _settings(found, is_placed) != _settings(config, is_placed):
                raise SubjectExists(
                    f"subject {config.name!r} exists with other settings, which `qmq subject show {config.name}` shows: choose another "
                    "name; `qmq subject alter` changes retention and the largest body"
                )
            return found

    async def get(self, name: str) -> SubjectConfig | None:
        """The subject's settings; None if it does not exist. Raises InvalidName."""
        found = await self._store.get(subject_key(name))
        return None if found is None or is_deleting(found) else decode_subject(found)

    async def _existing(self, name: str) -> KeyValue:
        """Read the subject's record, also during its deletion. Raises UnknownSubject."""
        found = await self._store.get(subject_key(name))
        if found is None:
            raise UnknownSubject(f"there is no subject {name!r}: see `qmq subject list`")
        return found

    async def list(self, prefix: str = "") -> list[SubjectConfig]:
        """All subjects that begin with `prefix`, in order."""
        return [decode_subject(item) for item in (await self._store.list(PREFIX + prefix)).items if not is_deleting(item)]

    async def alter(self, config: SubjectConfig) -> SubjectConfig:
        """Replace a subject's settings. Raises UnknownSubject."""
        return await self.update(config.name, lambda _: config)

    async def update(self, name: str, change: Callable[[SubjectConfig], SubjectConfig]) -> SubjectConfig:
        """Replace a subject by the result of `change`, which may be called again. Raises UnknownSubject, and the errors of `change`."""
        key = subject_key(name)
        while True:
            found = await self._existing(name)
            if is_deleting(found):
                raise _going(name)
            before = decode_subject(found)
            after = change(before)
            if after == before:
                return after
            try:
                if (await self._store.txn([unchanged(found)], [Put(key, encode_subject(after))])).succeeded:
                    return after
            except CoordinationUnknown:
                await self._sleep(PAUSE_S)  # if the change was made, `change` has nothing left to do

    async def begin_deleting(self, name: str) -> KeyValue:
        """Mark the subject as being deleted, and return its record. Raises UnknownSubject."""
        key = subject_key(name)
        while True:
            found = await self._existing(name)
            if is_deleting(found):
                return found
            marked = json.dumps({**json.loads(found.value), _DELETING: True}, sort_keys=True).encode()
            try:
                await self._store.txn([unchanged(found)], [Put(key, marked)])
            except CoordinationUnknown:
                await self._sleep(PAUSE_S)


def _settings(config: SubjectConfig, is_placed: bool) -> SubjectConfig:
    return replace(config, groups=tuple(sorted(config.groups)) if is_placed else (), former_groups=(), created_by="")


SCHEMAS: Final = "/qmq/schemas/"


def schemas_prefix(subject: str) -> str:
    """The prefix of all versions. Raises InvalidName."""
    return f"{SCHEMAS}{check_name('subject', subject)}/"


def schema_key(subject: str, version: int) -> str:
    """The key of a version. Keys are in the order of versions. Raises InvalidName."""
    return f"{schemas_prefix(subject)}{version:010}"
