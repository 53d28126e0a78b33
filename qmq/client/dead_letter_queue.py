"""A group's dead letters: show, replay and purge them.

    await mq.dead_letters("billing").show(10)
    await mq.dead_letters("billing").replay(lambda letter: letter.subject == "orders")

Operators are an ordinary consumer group of the dead-letter queue (`model.OPERATORS`): a dead letter that the group has settled was replayed
or purged; the others are pending. So two operators at the same queue never handle a dead letter at the same time, and a crash loses none. A
letter that was sent again and not settled is found by its copy, and settled then (`replayed_letters.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from qmq import limits
from qmq.batch_columns import Columns
from qmq.client.consumer import Consumer
from qmq.client.dead_letter import Choose, DeadLetter, Edit, columns_of, letter_of, parts_of
from qmq.client.delivery_client import DeliveryClient
from qmq.client.message import Message, Settler
from qmq.client.replayed_letters import ListEnds, ReadDirected, ReplayedLetters
from qmq.model import OPERATORS, check_name, dead_letter_subject
from qmq.wire.settle_payloads import Verdict

if TYPE_CHECKING:
    from qmq.proto.v1 import meta_pb2 as pb

PAGE: Final = 500
SendColumns = Callable[[str, Columns, int], Awaitable[None]]
"""(subject, columns with headers, create time in ms): returns when the messages are stored, under their own ids."""

FIRST_WAIT: Final = timedelta(seconds=10)
WAIT: Final = timedelta(seconds=1)
"""After this long without a delivery, the queue has no more dead letters."""


Progress = Callable[[int], None]
Do = Callable[[Sequence[DeadLetter]], Awaitable[None]]
DoneBefore = Callable[[Sequence[DeadLetter]], Awaitable[set[bytes]]]
"""The names of the letters that were sent again already."""


def _all(_: DeadLetter) -> bool:
    return True


def _quiet(_: int) -> None:
    return


def _as_it_is(letter: DeadLetter) -> DeadLetter:
    return letter


class DeadLetters:
    """Shows, replays and purges the dead letters of one group. Make it with `Client.dead_letters`."""

    def __init__(
        self,
        metadata: DeliveryClient,
        consumer: Callable[..., Consumer],
        send_directed: SendColumns,
        list_ends: ListEnds,
        read_directed: ReadDirected,
        group: str,
    ) -> None:
        self._metadata, self._consumer, self._send_directed = metadata, consumer, send_directed
        self._list_ends, self._read_directed = list_ends, read_directed
        self.group = check_name("group", group)
        self.subject = dead_letter_subject(group)

    async def describe(self) -> list[pb.DeadLetterQueue]:
        """The number of dead letters on each broker group."""
        return await self._metadata.dead_letter_queues(self.group)

    async def show(self, messages_max: int = 100, choose: Choose = _all) -> list[DeadLetter]:
        """The oldest pending dead letters that `choose` accepts. Changes nothing. Raises NotConnected."""
        found: list[DeadLetter] = []
        async with aclosing(self.each(choose)) as letters:
            async for letter in letters:
                found.append(letter)
                if len(found) >= messages_max:
                    break
        return found

    async def each(self, choose: Choose = _all) -> AsyncGenerator[DeadLetter, None]:
        """All pending dead letters that `choose` accepts, as `show`, one after the other: the caller keeps what it needs of each. Close it
        (`contextlib.aclosing`). Raises NotConnected.
        """
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                for _, letter in page:
                    if choose(letter):
                        yield letter

    async def replay(
        self,
        choose: Choose = _all,
        *,
        edit: Edit = _as_it_is,
        messages_max: int = 0,
        progress: Progress = _quiet,
        per_second: float = 0,
    ) -> int:
        """Send dead letters to their subjects again, for this group only, and return their number. They keep their ids and headers;
        attempts count from 1 again. No letter is sent twice, even if a replay is interrupted and repeated.

        `edit` returns the letter to send: its key, tags, headers and body count (`dataclasses.replace`). Sends at most `messages_max`
        letters, at most `per_second` each second; 0 means no limit. `progress` is called with the number of letters that are done. Raises
        as `Client.send`, and what `edit` raises; dead letters before the failure have been replayed. Needs `browse` on the subjects, too.
        """
        replayed = ReplayedLetters(self._list_ends, self._read_directed, self.group)

        async def send(letters: Sequence[DeadLetter]) -> None:
            columns, create_time_ms = columns_of([_edited(each, edit) for each in letters], letters[0].group)
            await self._send_directed(letters[0].subject, columns, create_time_ms)

        return await self._done(send, replayed.among, choose, messages_max, progress, per_second)

    async def purge(self, choose: Choose = _all, *, messages_max: int = 0, progress: Progress = _quiet) -> int:
        """Delete dead letters for good and return their number. Parameters as in `replay`."""
        return await self._done(_let_go, _none, choose, messages_max, progress)

    async def _done(
        self, do: Do, done_before: DoneBefore, choose: Choose, messages_max: int, progress: Progress, per_second: float = 0
    ) -> int:
        done, loop = 0, asyncio.get_running_loop()
        begun_s = loop.time()
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                chosen = [(message, letter) for message, letter in page if choose(letter)]
                for part in parts_of(chosen, letters_max=max(1, int(per_second)) if per_second else 0):
                    left = await _not_done(part, done_before)
                    if messages_max:
                        left = left[: messages_max - done]
                    if not left:
                        continue
                    if per_second:
                        await asyncio.sleep(max(0.0, begun_s + done / per_second - loop.time()))
                    await do([letter for _, letter in left])
                    for message, _ in left:
                        message.ack_later()
                    await left[-1][0].ack()
                    done += len(left)
                    progress(done)
                if done == messages_max > 0:
                    break
        return done

    async def _pages(self) -> AsyncGenerator[list[tuple[Message, DeadLetter]], None]:
        """All pending dead letters, the oldest first on each broker group. Letters that are not acknowledged go back at the end."""
        left = sum(queue.waiting for queue in await self.describe())
        if not left:
            return
        consumer = self._consumer(
            self.subject, OPERATORS, ack="explicit", prefetch=limits.CONSUMER_UNACKED_MAX, prefetch_bytes=limits.CONSUMER_UNACKED_BYTES_MAX
        )
        async with consumer:
            wait, seen = FIRST_WAIT, list[tuple[Settler, int, int]]()
            try:
                while left > 0 and (found := await consumer.pull(PAGE, wait)):  # empty: another consumer holds the rest
                    seen += [(each.settler, each.pull, each.pull + each.count - 1) for each in found.slices]  # without the bodies
                    wait, left = WAIT, left - len(found)
                    yield [(message, letter_of(message)) for message in found]
                    del found
            finally:
                for settler, first, last in seen:
                    settler.settle(first, last, Verdict.RELEASE)


async def _not_done(part: Sequence[tuple[Message, DeadLetter]], done_before: DoneBefore) -> list[tuple[Message, DeadLetter]]:
    """Settle letters that are already done, and return the others."""
    before = await done_before([letter for _, letter in part])
    for message, letter in part:
        if letter.name in before:
            message.ack_later()
    return [each for each in part if each[1].name not in before]


async def _let_go(_letters: Sequence[DeadLetter]) -> None:
    return


async def _none(_letters: Sequence[DeadLetter]) -> set[bytes]:
    return set()


def _edited(letter: DeadLetter, edit: Edit) -> DeadLetter:
    """The letter with its changes, under the same id."""
    made = edit(letter)
    return replace(letter, key=made.key, tags=made.tags, headers=made.headers, body=made.body)
