"""What a consumer does for each message.

    ReadyMessages   hands out a run of messages of one slice; between two of them only the lease's end is checked, by the clock
    MessageFields   the fields of a `Message`
    GatheredAcks    joins acknowledgements of consecutive messages into one range
    cut_bodies      makes the bodies of a batch

The consumer begins a run (`begin`) after it has looked at everything, and ends it (`end`) when something has changed: it was paused, it
failed, or somebody else takes or drops messages of the slice. A run also ends with its last message, and when the lease may be over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterator
from itertools import repeat
from operator import length_hint
from typing import Any, Final, Generic, Protocol, TypeVar

from qmq.batch_columns import bytes_column

cut_bodies: Final = bytes_column
"""(region, place of the offsets, place of the bytes, number of messages)"""


class MessageFields:
    """The fields of a `Message`, which has the methods."""

    __slots__ = ("_batch", "_index", "_settler", "attempt", "body", "is_settled", "pull_sequence")

    def __init__(self, settler: Any, batch: Any, index: int, attempt: int, pull: int) -> None:
        # Without the property for decoded bodies, because this runs for every message.
        bodies = batch.decoded
        self.body = batch.bodies[index] if bodies is None else bodies[index]
        self.attempt = attempt
        self.is_settled = False
        self._batch = batch
        self._index = index
        self._settler = settler
        self.pull_sequence = pull


MessageT = TypeVar("MessageT", bound=MessageFields)


class Consecutive(Protocol):
    """A `Slice`: `count` messages of a batch, from number `offset` in it and pull sequence `pull` on."""

    batch: Any
    offset: int
    count: int
    attempt: int
    pull: int
    settler: Any


class GatheredAcks:
    """The range of acknowledged messages, `ack_first` to `ack_last`, which messages up to `ack_limit` may join. Without a range `ack_last`
    and `ack_limit` are -1. A subclass begins ranges.
    """

    __slots__ = ("ack_first", "ack_last", "ack_limit")

    def __init__(self) -> None:
        self.ack_first, self.ack_last, self.ack_limit = 0, -1, -1

    def ack(self, pull: int) -> None:
        """Acknowledge a message. Consecutive messages become one range: most programs handle messages in order."""
        if pull == self.ack_last + 1 and pull <= self.ack_limit:
            self.ack_last = pull
        else:
            self.begin_acks(pull)

    def begin_acks(self, pull: int) -> None:
        """Settle the range, and begin another with this message."""
        raise NotImplementedError


class ReadyMessages(Generic[MessageT]):
    """Iterates over a consumer's messages. `current` is the message that the loop works on. It is acknowledged through `settler` when the
    loop asks for the next one, if it has no verdict and acknowledgement is automatic.

    `make` is the class of the messages. `refill` returns the next message if it needs no waiting, and may begin a run. `wait` returns the
    next message in any case, and calls `keep` with it.
    """

    __slots__ = ("_clock", "_is_auto", "_make", "_places", "_refill", "_run", "_slice", "_stop", "_until_s", "_wait", "current", "settler")

    def __init__(
        self,
        make: type[MessageT],
        clock: Callable[[], float],
        refill: Callable[[], MessageT | None],
        wait: Callable[[], Coroutine[Any, Any, MessageT]],
        is_auto: bool,
    ) -> None:
        self._make, self._clock, self._refill, self._wait, self._is_auto = make, clock, refill, wait, is_auto
        self.current: MessageT | None = None
        self.settler: Any = None
        self._slice: Consecutive | None = None
        self._places: Iterator[int] = iter(())
        self._run: Iterator[MessageT] = iter(())
        self._stop, self._until_s = 0, -math.inf

    def begin(self, part: Consecutive, count: int, until_s: float) -> None:
        """Hand out the first `count` messages of a slice, until that time at most. The slice has more, and its bodies are decoded."""
        self.end()
        self._slice, self._stop, self._until_s = part, part.offset + count, until_s
        self._places, pulls = iter(range(part.offset, self._stop)), range(part.pull, part.pull + count)
        self._run = map(self._make, repeat(part.settler), repeat(part.batch), self._places, repeat(part.attempt), pulls)

    def end(self) -> None:
        """Hand out no more. The slice then begins with the first message that was not handed out."""
        part, self._slice = self._slice, None
        if part is not None:
            count = self._stop - length_hint(self._places) - part.offset
            part.offset, part.pull, part.count = part.offset + count, part.pull + count, part.count - count
            self._run, self._until_s = iter(()), -math.inf

    def take(self) -> MessageT | None:
        """The next message, if it can be handed out without waiting."""
        message = next(self._run, None) if self._clock() <= self._until_s else None
        return self._refill() if message is None else message

    def __aiter__(self) -> ReadyMessages[MessageT]:
        return self

    async def __anext__(self) -> MessageT:
        current = self.current
        if current is not None:
            self.current = None
            if self._is_auto and not current.is_settled and self.settler is not None:
                self.settler.ack(current.pull_sequence)
        message = next(self._run, None) if self._clock() <= self._until_s else None
        if message is None:
            return await self._wait()
        self.current, self.settler = message, message._settler
        return message

    def keep(self, message: MessageT) -> MessageT:
        """The loop gets this message."""
        # The settler is kept apart, because the application may redirect the message's verdicts (qmq/blocking.py).
        self.current, self.settler = message, message._settler
        return message

    def forget(self) -> MessageT | None:
        """The loop has no message any more; returns the one that it had."""
        message, self.current = self.current, None
        return message
