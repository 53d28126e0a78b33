"""Replica messages as bytes: u8 kind | u32 length of the head | u32 CRC-32C of kind and head | head
| payload.

The head is MessagePack of the message's fields. It has a separate checksum, because a flipped bit
in a commit position would commit uncommitted entries. Only an Append has a payload: runs of log
bytes (qmq/log/follower.py), copied from the files with their checksums.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Any, Final, NamedTuple

import msgspec
from google_crc32c import value as crc32c

from qmq.errors import CorruptBatch, ProtocolViolation
from qmq.log.follower import check_stretch, pack_runs, unpack_runs
from qmq.log.recent_writes import WriteRun as LogRun
from qmq.log.store import PendingEntry
from qmq_replication.ready import (
    Ack,
    Append,
    LogReset,
    Message,
    Mismatch,
    Probe,
    ProbeReply,
    Promise,
    PromiseRequest,
    Refusal,
    TakeOver,
)

_HEAD: Final = Struct("<BII")
_KINDS: Final[tuple[type, ...]] = (
    Probe,
    ProbeReply,
    PromiseRequest,
    Promise,
    Append,
    Ack,
    Mismatch,
    LogReset,
    Refusal,
    TakeOver,
)
_DECODERS: Final[tuple[msgspec.msgpack.Decoder[Message], ...]] = tuple(
    msgspec.msgpack.Decoder(kind) for kind in _KINDS
)
_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}


class LogStretch(NamedTuple):
    """The payload of an Append as a slave reads it:
    the runs, and the checked entries of each run.
    """

    runs: list[LogRun]
    entries: list[list[PendingEntry]]


def pack(message: Message) -> list[bytes]:
    """The message's bytes, in pieces."""
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
    """Decode a message and check every checksum. An Append's payload becomes a LogStretch. Raises
    ProtocolViolation, CorruptBatch.
    """
    try:
        number, size, checksum = _HEAD.unpack_from(data)
        head = bytes(data[_HEAD.size : _HEAD.size + size])
        if _checksum(number, head) != checksum:
            raise ProtocolViolation("the checksum of a replica message's head is wrong")
        message = _DECODERS[number].decode(head)
    except (error, IndexError, UnicodeDecodeError, msgspec.MsgspecError) as cause:
        raise ProtocolViolation(f"not a replica message: {cause}") from None
    if isinstance(message, Ack | Mismatch | LogReset) and not _is_place(message.place):
        raise ProtocolViolation(f"not a place in two logs: {str(message.place)[:80]}")
    return (
        _with_payload(message, data[_HEAD.size + size :])
        if isinstance(message, Append)
        else message
    )


def _is_place(place: Any) -> bool:
    return (
        isinstance(place, list)
        and len(place) == 2
        and all(type(each) is int and each >= 0 for each in place)
    )


def _with_payload(message: Append, payload: memoryview) -> Append:
    after, last = message.prev_index, message.last_index
    if not len(payload):
        if last != after:
            raise CorruptBatch(f"an Append of {after + 1} to {last} without entries")
        return message
    found = unpack_runs(payload)
    return message._replace(payload=LogStretch(found, check_stretch(found, after, last)))
