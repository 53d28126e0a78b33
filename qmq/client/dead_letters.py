"""A group's dead letters: show, replay and purge them; each as a value, and as a copy that is sent
again.

    await mq.dead_letters("billing").show(10)
    await mq.dead_letters("billing").replay(lambda letter: letter.subject == "orders")

Operators are an ordinary consumer group of the dead-letter queue (`model.OPERATORS`): a dead letter
that the group has settled was replayed or purged; the others are pending. So two operators at the
same queue never handle a dead letter at the same time, and a crash loses none. A letter that was
sent again and not settled is found by its copy, and settled then.

No letter is sent twice, by any process. A replay sends a letter and then settles it. If the
process, the connection or the master ends in between, the letter is handed out again. Each copy
names its letter (`REPLAY_OF`), so the copies themselves are the record of earlier replays, and no
other record is needed. Before letters are sent, this module searches the subject's directed
messages that were stored since the first letter died.

    FIND on each queue      decides everything that brokers were sent before: stored, or never
    FETCH, directed only    the broker skips other batches by the consume log, without reading them

The next search continues where the last one ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from qmq import limits
from qmq.client.consuming.consumer import Consumer
from qmq.client.consuming.message import Message, Settler
from qmq.client.metadata.service import DeliveryClient
from qmq.errors import InvalidArgument
from qmq.model import (
    ATTEMPT,
    DEAD_MS,
    ERROR,
    GROUP,
    OPERATORS,
    PREFIX,
    REPLAY_OF,
    SEQUENCE,
    SUBJECT,
    MessageId,
    check_name,
    dead_letter_subject,
)
from qmq.text import whole_number
from qmq.wire.batch import CREATED_SPAN_MS, columns_of_copies
from qmq.wire.batch_columns import Columns
from qmq.wire.frame_payloads import Verdict

if TYPE_CHECKING:
    from qmq.client.consuming.message import Message, StoredMessage
    from qmq.proto.v1 import meta_pb2 as pb


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that failed its last attempt or was rejected. Times are milliseconds since 1970."""

    group: str
    """The consumer group; for a broadcast group with the consumer, as GROUP%CONSUMER."""
    subject: str
    """The subject to which the message was sent."""
    broker_group: str
    sequence: int
    """The message's sequence in that subject."""
    id: MessageId
    attempts: int
    error: str
    """The error of the last attempt."""
    dead_ms: int
    create_time_ms: int
    key: bytes | None
    tags: tuple[str, ...]
    headers: Mapping[str, bytes]
    """The message's own headers."""
    body: bytes
    letter_sequence: int
    """The letter's own sequence in the dead-letter queue, on `broker_group`."""

    @property
    def place(self) -> bytes:
        """Where the letter is and when it died: the value of `REPLAY_OF` on its copies."""
        return f"{self.broker_group}/{self.letter_sequence}/{self.dead_ms}".encode()

    @property
    def name(self) -> bytes:
        """A unique name: message id and place. A message that dies again is another letter."""
        return self.id.to_bytes() + self.place


_M = TypeVar("_M")
Choose = Callable[[DeadLetter], bool]
Edit = Callable[[DeadLetter], DeadLetter]


def _whole(text: bytes) -> int:
    found = whole_number(text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no number")
    return found


def letter_of(message: Message) -> DeadLetter:
    """Parse a message of a dead-letter queue. Raises InvalidArgument if it is not a dead letter."""
    found = message.headers
    try:
        return DeadLetter(
            found[GROUP].decode(),
            found[SUBJECT].decode(),
            message.broker_group,
            _whole(found[SEQUENCE]),
            message.id,
            _whole(found[ATTEMPT]),
            found[ERROR].decode(errors="replace"),
            _whole(found[DEAD_MS]),
            message.create_time_ms,
            message.key_bytes,
            message.tags,
            {name: value for name, value in found.items() if not name.startswith(PREFIX)},
            message.body,
            message.sequence,
        )
    except (KeyError, ValueError) as cause:
        raise InvalidArgument(
            f"message {message.sequence} of {message.subject} is not a dead letter: {cause!r}"
        ) from None


def parts_of(
    chosen: Sequence[tuple[_M, DeadLetter]], letters_max: int = 0
) -> list[list[tuple[_M, DeadLetter]]]:
    """Letters that can be sent in one batch: to one subject and group, with create times that fit
    together, and at most `letters_max` unless that is 0. Pure.
    """
    found: dict[tuple[str, str, int], list[tuple[_M, DeadLetter]]] = {}
    for each in chosen:
        letter = each[1]
        found.setdefault(
            (letter.subject, letter.group, letter.create_time_ms // CREATED_SPAN_MS), []
        ).append(each)
    return [
        part[at : at + (letters_max or len(part))]
        for part in found.values()
        for at in range(0, len(part), letters_max or len(part))
    ]


def columns_of(letters: Sequence[DeadLetter], group: str) -> tuple[Columns, int]:
    """(columns, first create time) of the letters, directed to the group; each says which letter it
    is of. Pure.
    """
    return columns_of_copies(
        [each.body for each in letters],
        [each.key or b"" for each in letters],
        [each.tags for each in letters],
        [{**each.headers, GROUP: group.encode(), REPLAY_OF: each.place} for each in letters],
        [each.create_time_ms for each in letters],
        [each.id.to_bytes() for each in letters],
    )


CLOCKS_MS: Final = 60_000
"""How much the clock of the broker that stored a copy may be behind that of the broker where the
message died.
"""

Ends = Mapping[tuple[str, int], int]
ListEnds = Callable[[str], Awaitable[Ends]]
ReadDirected = Callable[[str, int, Ends], "AsyncIterator[StoredMessage]"]
"""(subject, stored since in ms, where to begin in each queue): directed messages."""


@dataclass(slots=True)
class _SubjectSearch:
    """Progress of the search in one subject."""

    since_ms: int
    ends: Ends = field(default_factory=dict)
    names: set[bytes] = field(default_factory=set)


class ReplayedLetters:
    """Finds which dead letters of one consumer group were sent again. Needs `browse` and `produce`
    on the subjects.
    """

    def __init__(self, list_ends: ListEnds, read: ReadDirected, group: str) -> None:
        self._list_ends, self._read, self._group = list_ends, read, group
        self._searches: dict[str, _SubjectSearch] = {}

    async def among(self, letters: Iterable[DeadLetter]) -> set[bytes]:
        """The names of those letters that were sent again already. Raises NotConnected,
        AccessDenied, UnknownSubject, LogDamaged.
        """
        by_subject: dict[str, list[DeadLetter]] = {}
        for each in letters:
            by_subject.setdefault(each.subject, []).append(each)
        found: set[bytes] = set()
        for subject, its in by_subject.items():
            known = await self._replayed_since(
                subject, min(each.dead_ms for each in its) - CLOCKS_MS
            )
            found |= known & {each.name for each in its}
        return found

    async def _replayed_since(self, subject: str, since_ms: int) -> set[bytes]:
        search = self._searches.get(subject)
        if search is None or since_ms < search.since_ms:
            search = self._searches[subject] = _SubjectSearch(since_ms)
        ends = await self._list_ends(subject)
        async for message in self._read(subject, search.since_ms, search.ends):
            headers = message.headers
            if REPLAY_OF in headers and headers.get(GROUP) == self._group.encode():
                search.names.add(message.id.to_bytes() + headers[REPLAY_OF])
        search.ends = ends
        return search.names


PAGE: Final = 500
SendColumns = Callable[[str, Columns, int], Awaitable[None]]
"""(subject, columns with headers, create time in ms): returns when the messages are stored, under
their own ids.
"""

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
    """Shows, replays and purges the dead letters of one group.
    Make it with `Client.dead_letters`.
    """

    def __init__(
        self,
        metadata: DeliveryClient,
        consumer: Callable[..., Consumer],
        send_directed: SendColumns,
        list_ends: ListEnds,
        read_directed: ReadDirected,
        group: str,
    ) -> None:
        self._metadata, self._consumer, self._list_ends = metadata, consumer, list_ends
        self.send_directed = send_directed
        """Sends letters to their subject again, for one group only."""
        self.read_directed = read_directed
        """Reads what was sent to single groups: among it the letters that were sent again."""
        self.group = check_name("group", group)
        self.subject = dead_letter_subject(group)

    async def describe(self) -> list[pb.DeadLetterQueue]:
        """The number of dead letters on each broker group."""
        return await self._metadata.dead_letter_queues(self.group)

    async def show(self, messages_max: int = 100, choose: Choose = _all) -> list[DeadLetter]:
        """The oldest pending dead letters that `choose` accepts. Changes nothing.
        Raises NotConnected.
        """
        found: list[DeadLetter] = []
        async with aclosing(self.each(choose)) as letters:
            async for letter in letters:
                found.append(letter)
                if len(found) >= messages_max:
                    break
        return found

    async def each(self, choose: Choose = _all) -> AsyncGenerator[DeadLetter, None]:
        """All pending dead letters that `choose` accepts, as `show`, one after the other: the
        caller keeps what it needs of each. Close it (`contextlib.aclosing`). Raises NotConnected.
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
        """Send dead letters to their subjects again, for this group only, and return their number.
        They keep their ids and headers; attempts count from 1 again. No letter is sent twice, even
        if a replay is interrupted and repeated.

        `edit` returns the letter to send: its key, tags, headers and body count
        (`dataclasses.replace`). Sends at most `messages_max` letters, at most `per_second` each
        second; 0 means no limit. `progress` is called with the number of letters that are done.
        Raises as `Client.send`, and what `edit` raises; dead letters before the failure have been
        replayed. Needs `browse` on the subjects, too.
        """
        replayed = ReplayedLetters(self._list_ends, self.read_directed, self.group)

        async def send(letters: Sequence[DeadLetter]) -> None:
            columns, create_time_ms = columns_of(
                [_edited(each, edit) for each in letters], letters[0].group
            )
            await self.send_directed(letters[0].subject, columns, create_time_ms)

        return await self._done(send, replayed.among, choose, messages_max, progress, per_second)

    async def purge(
        self, choose: Choose = _all, *, messages_max: int = 0, progress: Progress = _quiet
    ) -> int:
        """Delete dead letters for good and return their number. Parameters as in `replay`."""
        return await self._done(_let_go, _none, choose, messages_max, progress)

    async def _done(
        self,
        do: Do,
        done_before: DoneBefore,
        choose: Choose,
        messages_max: int,
        progress: Progress,
        per_second: float = 0,
    ) -> int:
        done, loop = 0, asyncio.get_running_loop()
        begun_s = loop.time()
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                chosen = [(message, letter) for message, letter in page if choose(letter)]
                for part in parts_of(
                    chosen, letters_max=max(1, int(per_second)) if per_second else 0
                ):
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
        """All pending dead letters, the oldest first on each broker group. Letters that are not
        acknowledged go back at the end.
        """
        left = sum(queue.waiting for queue in await self.describe())
        if not left:
            return
        consumer = self._consumer(
            self.subject,
            OPERATORS,
            ack="explicit",
            prefetch=limits.CONSUMER_UNACKED_MAX,
            prefetch_bytes=limits.CONSUMER_UNACKED_BYTES_MAX,
        )
        async with consumer:
            wait, seen = FIRST_WAIT, list[tuple[Settler, int, int]]()
            try:
                # if nothing comes, another consumer holds the rest
                while left > 0 and (found := await consumer.pull(PAGE, wait)):
                    seen += [
                        (each.settler, each.pull, each.pull + each.count - 1)
                        for each in found.slices
                    ]  # without the bodies
                    wait, left = WAIT, left - len(found)
                    yield [(message, letter_of(message)) for message in found]
                    del found
            finally:
                for settler, first, last in seen:
                    settler.settle(first, last, Verdict.RELEASE)


async def _not_done(
    part: Sequence[tuple[Message, DeadLetter]], done_before: DoneBefore
) -> list[tuple[Message, DeadLetter]]:
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
