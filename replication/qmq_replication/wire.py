"""Replica messages as bytes: u8 kind | u32 length of the head | u32 CRC-32C of kind and head | head | payload.

The head is MessagePack of the message's fields; it has a checksum of its own, since a bit that flips in a commit position would commit
what is not. Only an Append has a payload: runs of log bytes (qmq/log/following.py), carried as they lie in the files, with theirs.
"""

from __future__ import annotations

import json
from struct import Struct, error
from typing import Final, NamedTuple

import msgspec
from google_crc32c import value as crc32c

from qmq.errors import CorruptBatch, ProtocolViolation
from qmq.log.following import check_stretch, pack_runs, unpack_runs
from qmq.log.store import PendingEntry
from qmq.log.tail import Run as LogRun
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
_HEAD: Final = Struct("<BII")
_KINDS: Final[tuple[type, ...]] = (
    Probe, ProbeReply, PromiseRequest, Promise, Append, Ack, Mismatch, Reset, Refusal, TakeOver,
)  # fmt: skip
_DECODERS: Final[tuple[msgspec.msgpack.Decoder[Message], ...]] = tuple(msgspec.msgpack.Decoder(kind) for kind in _KINDS)
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
    if isinstance(message, Append) and message.payload is not None:
        payload = pack_runs(message.payload)
        message = message._replace(payload=None)
    number, head = _NUMBERS[type(message)], msgspec.msgpack.encode(message)
    return [_HEAD.pack(number, len(head), _checksum(number, head)) + head, *payload]


def _checksum(number: int, head: bytes) -> int:
    found: int = crc32c(bytes((number,)) + head)
    return found


def unpack(data: memoryview) -> Message:
    """The inverse; an Append's payload becomes a Stretch, every checksum checked. Raises ProtocolViolation, CorruptBatch."""
    try:
        number, size, checksum = _HEAD.unpack_from(data)
        head = bytes(data[_HEAD.size : _HEAD.size + size])
        if _checksum(number, head) != checksum:
            raise ProtocolViolation("the checksum of a replica message's head does not hold")
        message = _DECODERS[number].decode(head)
    except (error, IndexError, msgspec.MsgspecError) as cause:
        raise ProtocolViolation(f"no replica message: {cause}") from None
    return _with_payload(message, data[_HEAD.size + size :]) if isinstance(message, Append) else message


def _with_payload(message: Append, payload: memoryview) -> Append:
    after, last = message.prev_index, message.last_index
    if not len(payload):
        if last != after:
            raise CorruptBatch(f"an Append of {after + 1} to {last} without entries")
        return message
    found = unpack_runs(payload)
    return message._replace(payload=Stretch(found, check_stretch(found, after, last)))
