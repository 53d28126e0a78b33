"""Writes the keys of a new cluster into an empty coordination store, and a mark by which an interrupted restore can continue."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from qmq_coordination.coordination_store import CoordinationStore, Put, absent

from qmq.backup.cluster_items import RESTORED, ROOT
from qmq.errors import CoordinationUnknown, NotEmpty

KEYS_PUT: Final = 64
"""Operations in one transaction. etcd allows 128 operations and 1.5 MiB."""
BYTES_PUT: Final = 1 << 19


@dataclass(frozen=True, slots=True)
class RestoreMark:
    """The record of a restore in the coordination store."""

    backup: str
    token: str
    """The token is also in the folders that the restore made, so that a folder of another cluster is never used for this one."""
    has_keys: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> RestoreMark:
        return cls(**json.loads(data))


async def known_mark(store: CoordinationStore, backup: str) -> RestoreMark | None:
    """The mark of an interrupted restore of this backup. Raises NotEmpty if the store has other keys."""
    found = await store.get(RESTORED)
    known = None if found is None else RestoreMark.decode(found.value)
    if known is not None and known.backup == backup:
        return known
    if (await store.list(ROOT, limit=1)).items:
        raise NotEmpty("the coordination store has a cluster already: restore into a new etcd, or into another namespace")
    return None


async def begin(store: CoordinationStore, backup: str) -> RestoreMark:
    """Raises NotEmpty."""
    mark = RestoreMark(backup, secrets.token_hex(8))
    done = await store.txn([absent(RESTORED)], [Put(RESTORED, mark.encode())])
    if not done.succeeded:
        raise NotEmpty("another restore into this coordination store has begun at this moment")
    return mark


async def put_items(store: CoordinationStore, items: Mapping[str, bytes]) -> None:
    """Put keys, in as few transactions as etcd allows. No server runs yet, so a late put only finds the value that it would write."""
    puts: list[Put] = []
    size = 0
    for key, value in sorted(items.items()):
        if puts and (len(puts) == KEYS_PUT or size + len(key) + len(value) > BYTES_PUT):
            await _put(store, puts)
            puts, size = [], 0
        puts.append(Put(key, value))
        size += len(key) + len(value)
    await _put(store, puts)


async def _put(store: CoordinationStore, puts: list[Put]) -> None:
    try:
        await store.txn([], puts)
    except CoordinationUnknown:
        await store.txn([], puts)
