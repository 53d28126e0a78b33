"""Checks of requests about delayed messages, for the metaserver and for a delay group's master. Pure.

A list of delayed messages comes in pages. Its order is by due time, then by the text of the id, over all delay groups; a *mark* is a
place in that order. A page begins after the last message of the previous one, whichever group has it, and no server keeps state.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from qmq.errors import InvalidArgument
from qmq.model import check_name
from qmq.proto.v1 import delay_pb2 as pb

LIST_MAX: Final = 1_000
LIST_DEFAULT: Final = 100

_MARK: Final = re.compile(r"(-?[0-9]{1,19}):(.*)\Z", re.DOTALL)


class ListMark(NamedTuple):
    """A place in a list: after the message with this due time and id. With an empty id: before the first of that due time."""

    due_ms: int
    id: str

    def __str__(self) -> str:
        return f"{self.due_ms}:{self.id}"

    @classmethod
    def parse(cls, text: str) -> ListMark:
        """Parse a mark; an empty text is the beginning. Raises InvalidArgument."""
        if not text:
            return BEGINNING
        match = _MARK.match(text)
        if match is None:
            raise InvalidArgument(f"{text!r} is not a place in a list of delayed messages: give the `next` of the previous page")
        return cls(int(match[1]), match[2])


BEGINNING: Final = ListMark(-(1 << 63), "")


class Listing(NamedTuple):
    """A checked ListDelayedRequest."""

    subject: str
    from_ms: int
    to_ms: int
    after: ListMark
    most: int
    is_half: bool


def listing(request: pb.ListDelayedRequest) -> Listing:
    """Check a request. Raises InvalidName, InvalidArgument."""
    if request.subject:
        check_name("subject", request.subject)
    if request.from_ms < 0 or request.to_ms < 0:
        raise InvalidArgument(f"times are milliseconds since 1970, or 0 for no limit, not {min(request.from_ms, request.to_ms)}")
    if request.to_ms and request.to_ms <= request.from_ms:
        raise InvalidArgument(f"the list is to end at {request.to_ms} ms, which is not after its beginning, {request.from_ms} ms")
    most = min(request.messages_max or LIST_DEFAULT, LIST_MAX)
    return Listing(request.subject, request.from_ms, request.to_ms, ListMark.parse(request.after), most, request.is_half)


def mark_of(message: pb.DelayedMessage) -> ListMark:
    """The place of a message in lists."""
    return ListMark(message.due_ms, message.id)


def new_due_ms(request: pb.MoveDelayedRequest) -> int:
    """The due time in a request. Raises InvalidArgument if there is none."""
    if request.due_ms <= 0:
        raise InvalidArgument(f"give the due time in milliseconds since 1970, not {request.due_ms}; a past time means immediately")
    return request.due_ms
