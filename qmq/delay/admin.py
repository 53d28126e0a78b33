"""Cancel, move and show single messages, on the master.

A message is *pending* until a plan has it. The first of plan and cancellation wins, decided here in
one thread: a message that the dispatcher has is taken back (`withdraw`), for a planned one it is
too late. The answer is sent when the action is committed. What is shown and listed is committed,
too: somebody decides by it.

The checks of requests are for the metaserver, too. A list of delayed messages comes in pages. Its
order is by due time, then by the text of the id, over all delay groups; a *mark* is a place in that
order. A page begins after the last message of the previous one, whichever group has it, and no
server keeps state.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from qmq.delay.batches import DueMessage, Places, SchedulePlace, check_due
from qmq.errors import CallerError, InvalidArgument, TooLate
from qmq.log.actions import Cancel, Postpone, ScheduleAction
from qmq.model import SCHEDULE_ID, DelayedId, MessageId, check_name
from qmq.proto.v1 import delay_pb2 as pb
from qmq.wire.batch_columns import BatchFlag

if TYPE_CHECKING:
    from qmq.delay.engine import DeliveryStatus, Engine
    from qmq.delay.schedule import Schedule

TRIES: Final = 10
"""How often the newest run of a recurring message is looked up while it changes."""
LOOK_MAX: Final = 2_000
"""Messages of all subjects that one page of a list examines."""
SAME_MAX: Final = 50_000
"""Messages with the same due time that a list can sort."""
HIGHEST_ID: Final = "~"
"""Greater than every id."""
_CANCELLED: Final = "cancelled"
_DIGITS: Final = re.compile(rb"[0-9a-f]{32}")
_RECURRING: Final = int(BatchFlag.RECURRING)
LIST_MAX: Final = 1_000
LIST_DEFAULT: Final = 100
_MARK: Final = re.compile(r"(-?[0-9]{1,19}):(.*)\Z", re.DOTALL)


class ListMark(NamedTuple):
    """A place in a list: after the message with this due time and id. With an empty id: before the
    first of that due time.
    """

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
            raise InvalidArgument(
                f"{text!r} is not a place in a list of delayed messages: give the `next` of "
                "the previous page"
            )
        return cls(int(match[1]), match[2])


BEGINNING: Final = ListMark(-(1 << 63), "")


class Listing(NamedTuple):
    """A checked ListDelayedRequest: at most `most` pending messages of the subject ("": of all)
    with from <= due < to (0: no limit), after that place in the list. With `is_half`, only messages
    that wait for a decision.
    """

    subject: str
    from_ms: int
    to_ms: int
    after: ListMark
    most: int
    is_half: bool = False


def listing(request: pb.ListDelayedRequest) -> Listing:
    """Check a request. Raises InvalidName, InvalidArgument."""
    if request.subject:
        check_name("subject", request.subject)
    if request.from_ms < 0 or request.to_ms < 0:
        raise InvalidArgument(
            "times are milliseconds since 1970, or 0 for no limit, not "
            f"{min(request.from_ms, request.to_ms)}"
        )
    if request.to_ms and request.to_ms <= request.from_ms:
        raise InvalidArgument(
            f"the list is to end at {request.to_ms} ms, which is not after its beginning, "
            f"{request.from_ms} ms"
        )
    most = min(request.messages_max or LIST_DEFAULT, LIST_MAX)
    return Listing(
        request.subject,
        request.from_ms,
        request.to_ms,
        ListMark.parse(request.after),
        most,
        request.is_half,
    )


def mark_of(message: pb.DelayedMessage) -> ListMark:
    """The place of a message in lists."""
    return ListMark(message.due_ms, message.id)


def new_due_ms(request: pb.MoveDelayedRequest) -> int:
    """The due time in a request. Raises InvalidArgument if there is none."""
    if request.due_ms <= 0:
        raise InvalidArgument(
            f"give the due time in milliseconds since 1970, not {request.due_ms}; a past "
            "time means immediately"
        )
    return request.due_ms


class EngineAdmin:
    """`engine` raises NotMaster while there is no engine."""

    def __init__(self, engine: Callable[[], Engine], group: str, delay_ms_max: int) -> None:
        self._engine = engine
        self._group = group
        self._delay_ms_max = delay_ms_max
        self.cancelled = self.moved = 0
        """Cancelled and moved messages since the process began."""

    async def cancel(self, delayed: DelayedId) -> DueMessage:
        """Cancel a message. Returns when that is committed. A repeated call has the same result.
        Raises TooLate, MessageNotFound, NotMaster (outcome unknown).
        """
        engine = self._engine()
        place = engine.schedule.find(delayed)
        if engine.schedule.state_of(place) == _CANCELLED:
            await engine.writer.committed()
            return self._message(place)
        message = await self._take(delayed, lambda found: Cancel(*found))
        self.cancelled += 1
        return message

    async def move(self, delayed: DelayedId, due_ms: int) -> DueMessage:
        engine = self._engine()
        now_ms = engine.clock.time_ms()
        check_due(due_ms, now_ms, self._delay_ms_max)
        due_ms = max(due_ms, now_ms)
        moved = await self._take(delayed, lambda found: Postpone(*found, due_ms))
        self.moved += 1
        # not read again: the mastership may be lost by now, and the move is done all the same
        return replace(moved, due_ms=due_ms)

    async def _take(
        self, delayed: DelayedId, act: Callable[[SchedulePlace], ScheduleAction]
    ) -> DueMessage:
        engine = self._engine()
        for _ in range(TRIES):
            place = engine.schedule.find(delayed)
            message = self._message(place)
            if self._is_free(place):
                engine.plan_log.leaving.add(place)
                try:
                    engine.writer.act(act(place))
                    await engine.writer.committed()
                finally:
                    engine.plan_log.leaving.discard(place)
                return message
            await engine.writer.committed()
            if engine.schedule.find(delayed) == place:
                break  # else it recurs, and its next run is another message
        raise TooLate(
            f"{delayed} is {engine.schedule.state_of(place)}: it can be cancelled or moved "
            "until it is due"
        )

    def _is_free(self, place: SchedulePlace) -> bool:
        """Whether the message is pending, and was not planned by the dispatcher."""
        engine = self._engine()
        if engine.schedule.state_of(place) != "pending" or place in engine.plan_log.leaving:
            return False
        if place not in engine.plan_log.in_dispatch:
            return True
        if not engine.dispatcher.withdraw(place):
            return False
        engine.plan_log.in_dispatch.discard(place)
        return True

    @asynccontextmanager
    async def _committed_read(self) -> AsyncIterator[Schedule]:
        """What is read in the block, without a pause, is committed when the block ends, with a
        result or a refusal. Otherwise the next master could deny a decision that was shown. Raises
        NotMaster.
        """
        engine = self._engine()
        try:
            yield engine.schedule
        except CallerError:
            await engine.writer.committed()
            raise
        await engine.writer.committed()

    async def show(self, delayed: DelayedId) -> tuple[DueMessage, str]:
        async with self._committed_read() as schedule:
            place = schedule.find(delayed)
            return self._message(place), schedule.state_of(place)

    def _message(self, place: SchedulePlace) -> DueMessage:
        return self._engine().schedule.read(Places.of([place]))[0]

    async def listed(self, wanted: Listing) -> tuple[list[DueMessage], ListMark | None]:
        """A page of pending messages, by due time and then by id. Also returns the place after
        which the next page begins, or None at the end: a page may have fewer messages than asked
        for although more follow. One call examines a few thousand messages, while deliveries wait.
        Raises InvalidArgument.
        """
        async with self._committed_read() as schedule:
            return self._page(schedule, wanted)

    def _page(
        self, schedule: Schedule, wanted: Listing
    ) -> tuple[list[DueMessage], ListMark | None]:
        subject, from_ms, to_ms, after, most, is_half = wanted
        found: list[DueMessage] = []
        last: DueMessage | None = None
        begin_ms = max(from_ms, after.due_ms + (after.id >= HIGHEST_ID))
        flags = int(BatchFlag.HALF) if is_half else 0
        for looked, message in enumerate(schedule.scan("", begin_ms, to_ms, flags=flags)):
            if (
                last is not None
                and message.due_ms > last.due_ms
                and (len(found) >= most or looked >= LOOK_MAX)
            ):
                # messages with the same due time are sorted by id, so a page ends only between two
                # due times
                break
            last = message
            if looked >= SAME_MAX:
                raise InvalidArgument(
                    f"over {SAME_MAX} messages are due at {message.due_ms} ms: list a time "
                    "before or after"
                )
            if (not subject or message.subject == subject) and self._order(message) > after:
                found.append(message)
        else:
            last = None
        found.sort(key=self._order)
        if len(found) > most:
            return found[:most], self._order(found[most - 1])
        return found, None if last is None else ListMark(last.due_ms, HIGHEST_ID)

    def _order(self, message: DueMessage) -> ListMark:
        return ListMark(message.due_ms, str(self.id_of(message)))

    def id_of(self, message: DueMessage) -> DelayedId:
        """The message's public id; a run has the id of its recurring message."""
        digits = message.message_id.hex()
        first = message.headers.get(SCHEDULE_ID, b"") if message.flags & _RECURRING else b""
        if _DIGITS.fullmatch(first):
            digits = first.decode()
        return DelayedId(MessageId.parse(digits), message.due_ms, message.append_ms, self._group)

    def status(self) -> DeliveryStatus:
        return self._engine().status()
