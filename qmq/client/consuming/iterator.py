"""What a consumer does for each message.

    ReadyMessages   hands out a run of messages of one slice; between two of them only the lease's
                    end is checked, by the clock
    MessageFields   the fields of a `Message`
    TaskHolding     what a task got and has not finished
    GatheredAcks    joins acknowledgements of consecutive messages into one range
    cut_bodies      makes the bodies of a batch

The consumer begins a run (`begin`) after it has looked at everything, and ends it (`end`) when
something has changed: it was paused, it failed, or somebody else takes or drops messages of the
slice. A run also ends with its last message, and when the lease may be over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator
from itertools import repeat
from operator import length_hint
from typing import Any, Final, Generic, TypeVar

from qmq.wire.batch_columns import bytes_column

cut_bodies: Final = bytes_column
"""(region, place of the offsets, place of the bytes, number of messages)"""
LOOP_S: Final = 0.05
"""For how long a loop over messages may keep the event loop to itself."""


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


class GatheredAcks:
    """The range of acknowledged messages, `ack_first` to `ack_last`, which messages up to
    `ack_limit` may join. Without a range `ack_last` and `ack_limit` are -1. A subclass begins
    ranges.
    """

    __slots__ = ("ack_first", "ack_last", "ack_limit")

    def __init__(self) -> None:
        self.ack_first, self.ack_last, self.ack_limit = 0, -1, -1

    def ack(self, pull: int) -> None:
        """Acknowledge a message. Consecutive messages become one range: most programs handle
        messages in order.
        """
        if pull == self.ack_last + 1 and pull <= self.ack_limit:
            self.ack_last = pull
        else:
            self.begin_acks(pull)

    def begin_acks(self, pull: int) -> None:
        """Settle the range, and begin another with this message."""
        raise NotImplementedError


class TaskHolding:
    """What a task holds: `message` is the last one that it got and has not finished; `earlier` are
    others, if it asked for several at a time. `task` is None when the task has ended.
    """

    __slots__ = ("earlier", "message", "task")

    def __init__(self, task: Any) -> None:
        self.task = task
        self.message: Any = None
        self.earlier: list[Any] | None = None


class ReadyMessages(Generic[MessageT]):
    """Iterates over a consumer's messages. What a task gets is in `held`, a `TaskMessages`, and
    acknowledged when that task asks for the next one, if it has no verdict by then. Without `held`
    nothing is acknowledged.

    `make` is the class of the messages. `refill` returns the next message if it needs no waiting,
    and may begin a run. `wait` returns the next message in any case.

    A loop whose body never waits gets its messages without waiting either: each `LOOP_S` it lets
    the event loop run once, because heartbeats and other tasks need it.

    With `one_by_one` a run hands out a message only when its task has finished the one before it;
    otherwise `wait` decides.
    """

    __slots__ = (
        "_clock",
        "_given_to",
        "_held",
        "_holding",
        "_make",
        "_one_by_one",
        "_places",
        "_refill",
        "_rest_s",
        "_run",
        "_slice",
        "_stop",
        "_until_s",
        "_wait",
    )

    def __init__(
        self,
        make: type[MessageT],
        clock: Callable[[], float],
        refill: Callable[[], MessageT | None],
        wait: Callable[[], Coroutine[Any, Any, MessageT]],
        held: Any,
        *,
        one_by_one: bool = False,
    ) -> None:
        self._make, self._clock, self._refill, self._wait, self._held = (
            make,
            clock,
            refill,
            wait,
            held,
        )
        self._holding = TaskHolding(None)
        """That of the task which asked last."""
        self._one_by_one = one_by_one
        self._given_to: TaskHolding | None = None
        """One by one: that of the task which got the last message."""
        self._slice: Any = None
        self._places: Iterator[int] = iter(())
        self._run: Iterator[MessageT] = iter(())
        self._stop, self._until_s = 0, -math.inf
        self._rest_s = clock() + LOOP_S

    def begin(self, part: Any, count: int, until_s: float) -> None:
        """Hand out the first `count` messages of a `BatchSlice`, until that time at most. The slice
        has more, and its bodies are decoded.
        """
        self.end()
        self._slice, self._stop, self._until_s = part, part.offset + count, until_s
        self._places, pulls = (
            iter(range(part.offset, self._stop)),
            range(part.pull, part.pull + count),
        )
        self._run = map(
            self._make,
            repeat(part.settler),
            repeat(part.batch),
            self._places,
            repeat(part.attempt),
            pulls,
        )

    def end(self) -> None:
        """Hand out no more. The slice then begins with the first message that
        was not handed out.
        """
        part, self._slice = self._slice, None
        if part is not None:
            count = self._stop - length_hint(self._places) - part.offset
            part.offset, part.pull, part.count = (
                part.offset + count,
                part.pull + count,
                part.count - count,
            )
            self._run, self._until_s = iter(()), -math.inf

    def take(self) -> MessageT | None:
        """The next message, if it can be handed out without waiting. It is no task's: nothing
        acknowledges it.
        """
        message = next(self._run, None) if self._clock() <= self._until_s else None
        return self._refill() if message is None else message

    def __aiter__(self) -> ReadyMessages[MessageT]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, MessageT]:
        held = self._held
        if held is None:
            return self._next(None, None)
        task, holding = held.task(), self._holding
        if task is None or holding.task is not task:
            self._holding = holding = held.holding(task)
        return self._next(holding, holding.message)

    async def _next(self, holding: TaskHolding | None, last: MessageT | None) -> MessageT:
        if last is not None and holding is not None:
            if last is holding.message and holding.earlier is None:
                holding.message = None
                if not last.is_settled:
                    last._settler.ack(last.pull_sequence)
            elif self._held is not None:
                self._held.finish(holding, last)
        now_s = self._clock()
        if self._until_s >= now_s > self._rest_s:
            self._rest_s = now_s + LOOP_S
            await asyncio.sleep(0)
        message = next(self._run, None) if now_s <= self._until_s and self._may_give() else None
        if message is None:
            message = await self._wait()
        if holding is not None:
            if self._one_by_one:
                self._given_to = holding
            if holding.message is None and holding.task is not None:
                holding.message = message
            elif self._held is not None:
                self._held.add(holding, message)
        return message

    def _may_give(self) -> bool:
        before = self._given_to
        return before is None or (before.task is not None and before.message is None)
