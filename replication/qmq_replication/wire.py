"""Replica messages as bytes: u8 kind | u32 length of the head | head, MessagePack of the message's fields | payload.

Only an Append has a payload: runs of log bytes (qmq/log/following.py), carried as they lie in the files.
"""

from __future__ import annotations

import json
from struct import Struct, error
from typing import Any, Final, NamedTuple

import msgspec

from qmq.errors import CorruptBatch, ProtocolViolation
from qmq.log.following import check_stretch, pack_runs, unpack_runs
from qmq.log.store import PendingEntry
from qmq.log.tail import Run as LogRun
from qmq_replication.history import Run
from qmq_replication.messages import (
    Ack,
    Append,
    Message,
    Mismatch,
    Probe,
    ProbeReply,
    Promise,
    PromiseRequest,
    Refusal,
    Reset,
    TakeOver,
)

VERSION: Final = 1
_HEAD: Final = Struct("<BI")
_KINDS: Final[tuple[type, ...]] = (
    Probe, ProbeReply, PromiseRequest, Promise, Append, Ack, Mismatch, Reset, Refusal, TakeOver,
)  # fmt: skip
_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}


class Stretch(NamedTuple):
    """An Append's payload as a slave takes it: the runs, and each one's entries, checked."""

    runs: list[LogRun]
    entries: list[list[PendingEntry]]


class PeerHello(NamedTuple):
    """First thing a replica says to another."""

    group: str
    replica: str

    def pack(self) -> bytes:
        """As sent."""
        return json.dumps({"version": VERSION, "group": self.group, "replica": self.replica}).encode()

    @classmethod
    def unpack(cls, payload: memoryview) -> PeerHello:
        """Raises ProtocolViolation."""
        try:
            found = json.loads(bytes(payload))
            if found["version"] != VERSION:
                raise ProtocolViolation(f"this replica speaks version {VERSION}, the other {found['version']}")
            return cls(str(found["group"]), str(found["replica"]))
        except (ValueError, KeyError, TypeError) as cause:
            raise ProtocolViolation(f"no replica's hello: {cause}") from None


def pack(message: Message) -> list[bytes]:
    """A message's bytes, in pieces."""
    payload: list[bytes] = []
    fields: tuple[Any, ...] = tuple(message)
    if isinstance(message, Append):
        fields = fields[:-1]
        if message.payload is not None:
            payload = pack_runs(message.payload)
    head = msgspec.msgpack.encode(fields)
    return [_HEAD.pack(_NUMBERS[type(message)], len(head)) + head, *payload]


def unpack(data: memoryview) -> Message:
    """The inverse; an Append's payload becomes a Stretch, every checksum checked. Raises ProtocolViolation, CorruptBatch."""
    try:
        number, size = _HEAD.unpack_from(data)
        fields = msgspec.msgpack.decode(data[_HEAD.size : _HEAD.size + size])
        kind = _KINDS[number]
        if kind is Append:
            return _append(fields, data[_HEAD.size + size :])
        if kind is Mismatch:
            fields[5] = tuple(Run(*each) for each in fields[5])
        message: Message = kind(*fields)
        return message
    except (error, IndexError, TypeError, ValueError, msgspec.MsgspecError) as cause:
        raise ProtocolViolation(f"no replica message: {cause}") from None


def _append(fields: list[Any], payload: memoryview) -> Append:
    runs = tuple(Run(*each) for each in fields[4])
    after, last = fields[3], fields[5]
    if not len(payload):
        if last != after:
            raise CorruptBatch(f"an Append of {after + 1} to {last} without entries")
        return Append._make([*fields[:4], runs, *fields[5:], None])
    found = unpack_runs(payload)
    return Append._make([*fields[:4], runs, *fields[5:], Stretch(found, check_stretch(found, after, last))])
