"""The unplanned due messages of one subject (or partition), in order, and the making of batches from them. Pure.

Rules:
* Only messages of one *sort* share a batch: a batch has one set of flags, and directed messages of one batch have one consumer group;
  create times are within 2^32 ms of each other, the range of a batch's column.
* A batch takes the first message, and then later ones of the same sort, skipping others. Later messages of a skipped key are skipped, too:
  each key keeps its order, and mixed sorts still make large batches.
* A batch has a limit of messages and bytes; a larger message goes alone. A *suspect* (it was in a batch that was refused as
  too large) is only taken into batches of at most as many messages as its entry says.

Worked example: k:1, l:2 (directed), l:3, k:4. The first batch is 1 and 4: 2 is of another sort, and 3 comes after 2. The second one is 2,
the third 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from qmq import model
from qmq.delay.interfaces import Draft, DueMessage, SchedulePlace
from qmq.wire.batch import columns_of_copies, encode
from qmq.wire.batch_columns import BatchFlag

AHEAD: Final = 4
"""A batch is selected from at most this multiple of its number of messages."""
MESSAGE_BYTES: Final = 40
"""The approximate bytes of a message besides its body, key, tags and headers."""
_ERA_BITS: Final = 32
_DIRECTED: Final = int(BatchFlag.DIRECTED)
_AGAIN: Final = int(BatchFlag.AGAIN)

Sort = tuple[int, bytes | None]
"""The properties that messages of one batch must share: the era of the create time, and the consumer group that the message is directed to
(None: all groups).
"""


class Limits(NamedTuple):
    """The limits of one batch."""

    messages: int
    bytes: int


def sort_of(message: DueMessage) -> Sort:
    """The properties that messages of one batch must share."""
    group = message.headers.get(model.GROUP, b"") if message.flags & _DIRECTED else None
    return message.create_time_ms >> _ERA_BITS, group


def size_of(message: DueMessage) -> int:
    """The approximate bytes of a message in a batch."""
    size = len(message.body) + len(message.key) + MESSAGE_BYTES
    if message.tags:
        size += sum(map(len, message.tags)) + 16 * len(message.tags)
    if message.headers:
        size += sum(map(len, message.headers)) + sum(map(len, message.headers.values())) + 8 * len(message.headers)
    return size


class DueBatcher:
    """`suspects` is shared by the batchers of a subject."""

    def __init__(self, limits: Limits, suspects: dict[SchedulePlace, int] | None = None) -> None:
        self.messages: deque[DueMessage] = deque()
        self._limits = limits
        self._suspects = suspects if suspects is not None else {}

    def __len__(self) -> int:
        return len(self.messages)

    def __bool__(self) -> bool:
        return bool(self.messages)

    def put_back(self, messages: Sequence[DueMessage]) -> None:
        """Add messages before all others, in order."""
        self.messages.extendleft(reversed(messages))

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message; False if it is not here."""
        for at, message in enumerate(self.messages):
            if message.place == place:
                del self.messages[at]
                return True
        return False

    def take(self) -> tuple[list[DueMessage], int]:
        """The next batch and its approximate bytes. There must be a message."""
        messages, (most, bytes_max), suspects = self.messages, self._limits, self._suspects
        sort = sort_of(messages[0])
        era, is_directed = sort[0], sort[1] is not None
        taken, passed, keys = list[DueMessage](), list[DueMessage](), set[bytes]()
        size = 0
        while messages and len(taken) < most and len(passed) < AHEAD * most:
            message = messages[0]
            is_other = message.create_time_ms >> _ERA_BITS != era or (message.flags & _DIRECTED != 0) != is_directed
            if is_other or (is_directed and sort_of(message) != sort) or (keys and message.key in keys):
                passed.append(messages.popleft())
                if message.key:
                    keys.add(message.key)
                continue
            grown = size + size_of(message)
            if suspects:
                most = min(most, suspects.get(message.place, most))
            if taken and (grown > bytes_max or len(taken) >= most):
                break
            taken.append(messages.popleft())
            size = grown
        self.put_back(passed)
        return taken, size


def encoded(draft: Draft, logical_partitions: Sequence[int] | None = None, *, is_again: bool = False) -> tuple[bytes, bytes]:
    """The encoded batch: messages of one sort as they were sent, without the column DUE; with `is_again` if it may have been sent before.

    Raises MessageTooLarge, InvalidArgument.
    """
    messages = draft.messages
    keys = [message.key for message in messages]
    columns, created = columns_of_copies(
        [message.body for message in messages],
        keys,
        [message.tags for message in messages],
        [message.headers for message in messages],
        [message.create_time_ms for message in messages],
        [message.message_id for message in messages],
    )
    if logical_partitions is not None:
        columns.keys, columns.logical_partitions = keys, logical_partitions
    return encode(
        draft.subject.encode(),
        columns,
        producer_id=draft.producer_id,
        batch_sequence=draft.batch_sequence,
        create_time_ms=created,
        flags=messages[0].flags & _DIRECTED | (_AGAIN if is_again else 0),
        partition=draft.partition,
    )
