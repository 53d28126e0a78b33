"""Messages that were handed out and are not settled: their invisible times and receipt handles.
Pure: the caller passes the time.

    hand out ──▶ invisible ──▶ acknowledged, or to the dead letters
                  │   ▲  └──▶ time over: visible again, one attempt older
                  └───┘ change the time: a new handle, and the old one is void

Rules:
* A handle is valid for one message and one consumer group, until its time ends or is changed. A
  later call with the handle gets an error and changes nothing.
* With `renews_until_ms` a message whose time ends stays invisible for as long again, while its
  client is alive, up to that moment.
* A handle contains the gateway that has the message, the message's number there, and a random
  secret, so that no client can guess another handle. Clients must not interpret it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from struct import Struct
from typing import Final, Generic, TypeVar

from qmq.gateway.status import Refused
from qmq.proto.rocketmq import definition_pb2 as api

GATEWAY_ID_BYTES: Final = 8
SECRET_BYTES: Final = 8
_HANDLE: Final = Struct(f"<{GATEWAY_ID_BYTES}sQI{SECRET_BYTES}s")
_M = TypeVar("_M")


@dataclass(slots=True, eq=False)
class InvisibleMessage(Generic[_M]):
    """One message that a client received and has not settled.
    Times are milliseconds of a monotonic clock.
    """

    message: _M
    subject: str
    group: str
    client_id: str
    number: int
    secret: bytes
    until_ms: int
    invisible_ms: int
    renews_until_ms: int = 0
    """0: the gateway does not renew the message's time."""
    change: int = 0
    """How often a client changed the message's time."""


@dataclass(frozen=True, slots=True)
class ReceiptHandle:
    """The parts of a receipt handle."""

    gateway_id: bytes
    number: int
    change: int
    secret: bytes

    def __str__(self) -> str:
        packed = _HANDLE.pack(self.gateway_id, self.number, self.change, self.secret)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> ReceiptHandle:
        """Parse a handle. Raises Refused."""
        try:
            return cls(*_HANDLE.unpack(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))))
        except (ValueError, struct.error, binascii.Error):
            raise Refused(
                api.INVALID_RECEIPT_HANDLE, "this is not a receipt handle of QMQ's gateway"
            ) from None


class InvisibleMessages(Generic[_M]):
    """All invisible messages of one gateway."""

    def __init__(self, gateway_id: bytes, random_bytes: Callable[[int], bytes]) -> None:
        self.gateway_id = gateway_id
        self._random_bytes = random_bytes
        self._messages: dict[int, InvisibleMessage[_M]] = {}
        self._ends: list[tuple[int, int]] = []
        """A heap of (end of the invisible time, message number). It also has entries of messages
        that were settled or changed.
        """
        self._next = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(
        self,
        message: _M,
        subject: str,
        group: str,
        client_id: str,
        *,
        now_ms: int,
        invisible_ms: int,
        renews_until_ms: int = 0,
    ) -> InvisibleMessage[_M]:
        """Record that a message was handed out."""
        number, self._next = self._next, self._next + 1
        secret = self._random_bytes(SECRET_BYTES)
        found = InvisibleMessage(
            message,
            subject,
            group,
            client_id,
            number,
            secret,
            now_ms + invisible_ms,
            invisible_ms,
            renews_until_ms,
        )
        self._messages[number] = found
        heappush(self._ends, (found.until_ms, number))
        return found

    def handle(self, held: InvisibleMessage[_M]) -> ReceiptHandle:
        """The handle with which the client settles the message.
        A change of the time makes it void.
        """
        return ReceiptHandle(self.gateway_id, held.number, held.change, held.secret)

    def find(self, text: str, subject: str, group: str, now_ms: int) -> InvisibleMessage[_M]:
        """Find the message of a handle. Raises Refused."""
        handle = ReceiptHandle.parse(text)
        held = self._messages.get(handle.number) if handle.gateway_id == self.gateway_id else None
        is_right = (
            held is not None
            and hmac.compare_digest(held.secret, handle.secret)
            and held.change == handle.change
        )
        if (
            held is None
            or not is_right
            or (held.subject, held.group) != (subject, group)
            or held.until_ms <= now_ms
        ):
            raise Refused(
                api.INVALID_RECEIPT_HANDLE,
                (
                    "the message's invisible time has ended, or was changed: the message is "
                    "received again"
                ),
            )
        return held

    def change_time(self, held: InvisibleMessage[_M], *, now_ms: int, invisible_ms: int) -> None:
        """Restart the message's invisible time from now, and make its handle void."""
        held.change += 1
        held.renews_until_ms = 0
        held.until_ms, held.invisible_ms = now_ms + invisible_ms, invisible_ms
        heappush(self._ends, (held.until_ms, held.number))

    def remove(self, held: InvisibleMessage[_M]) -> None:
        """Remove a settled message."""
        self._messages.pop(held.number, None)

    def remove_over(
        self, now_ms: int, is_alive: Callable[[str], bool]
    ) -> list[InvisibleMessage[_M]]:
        """Remove and return the messages whose time has ended. If the client is alive, a message
        with renewal gets a new time instead.
        """
        over = []
        while self._ends and self._ends[0][0] <= now_ms:
            end_ms, number = heappop(self._ends)
            held = self._messages.get(number)
            if held is None or held.until_ms != end_ms:
                continue
            if now_ms < held.renews_until_ms and is_alive(held.client_id):
                held.until_ms = now_ms + held.invisible_ms
                heappush(self._ends, (held.until_ms, number))
            else:
                del self._messages[number]
                over.append(held)
        return over

    def remove_of_client(self, client_id: str, group: str) -> list[InvisibleMessage[_M]]:
        """Remove and return the messages that a client of a group holds."""
        found = [
            each
            for each in self._messages.values()
            if each.client_id == client_id and each.group == group
        ]
        for each in found:
            del self._messages[each.number]
        return found

    def take_all(self) -> list[InvisibleMessage[_M]]:
        """Remove and return all messages."""
        found, self._messages, self._ends = list(self._messages.values()), {}, []
        return found
