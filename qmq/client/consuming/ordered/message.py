"""The messages that an ordered consumer hands out, with their lane and their verdicts: one by one,
or in bulk: consecutive messages of one lane, in its order, with one verdict.

A *run* has the delivered messages of one batch, and the cell by which they are settled (`lane.py`).
`OrderedMessages` holds runs of one lane. Message objects are made only if the application iterates.
One by one, `LaneRun` takes the verdicts of its messages.

Which batches stay decompressed (`DecompressedBatches`): a message that is handed out has its own
body; the rest of its batch stays decompressed for the messages that follow. But one of them may
wait for its key while messages of other batches are handed out: then each of these batches would
stay decompressed.

    batch 1: a b      batch 2: c b      batch 3: d b
    a, c and d are handed out and finished; the messages of b wait
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import itemgetter
from typing import Final, Protocol
from weakref import ref

from qmq_ordering.lanes import Lane
from qmq_ordering.routes import LpRange

from qmq.client.consuming import MessageFields
from qmq.client.consuming.message import (
    CONTENT,
    AckRange,
    DecodedBatch,
    StoredMessage,
    delay_ms,
    error_text,
)
from qmq.client.consuming.ordered.lane import Cell, LaneCore

log = logging.getLogger("qmq.client")

ACKS_MAX: Final = 64
"""Acknowledgements that a run gathers before they are settled; a quarter of the run if that is
less, so that pulls leave in time.
"""


class LaneSource(Protocol):
    """The lane that a message came from."""

    core: LaneCore
    lane: Lane
    subject: str
    broker_group: str
    partition: int

    @property
    def lps(self) -> LpRange:
        """The logical partitions of the lane."""
        ...

    @property
    def sure_until_s(self) -> float:
        """Until when, by the event loop's clock, the lane's lease cannot end."""
        ...

    def is_sure(self) -> bool:
        """Whether the lane's lease cannot have ended, as far as this consumer knows."""
        ...

    def worked(self, *, is_urgent: bool) -> None:
        """A handler finished, successfully or not.
        Settle soon, or immediately if the request is full.
        """
        ...

    async def confirmed(self, cell: Cell) -> None:
        """Returns when the broker has the verdict. Raises LaneLost, NotConnected, ClientClosed."""
        ...


class LaneSettler(Protocol):
    """Takes the verdicts on messages of a run, by their sequences:
    the run, or a listener's wrapper around it.
    """

    @property
    def run(self) -> LaneRun: ...

    def ack(self, sequence: int) -> None:
        """The message was handled."""
        ...

    def fail(self, sequence: int, pause_ms: int | None) -> None:
        """The message failed."""
        ...

    def reject(self, sequence: int) -> None:
        """The handler rejected the message: no retry can help."""
        ...

    def release(self, sequence: int) -> None:
        """The handler gives the message back untouched."""
        ...


class RunVerdicts(Protocol):
    """What becomes of verdicts: the inbox of a consumer (`lane_reader.py`)."""

    def at_end(self, call: Callable[[], None], /) -> None:
        """Call at the end of this round of the event loop."""
        ...

    def finish(self, run: LaneRun, sequence: int) -> None: ...

    def finish_range(self, run: LaneRun, last: int) -> None:
        """The messages of a run in sequence, up to `last`, were handled."""
        ...

    def fail(self, run: LaneRun, sequence: int, pause_ms: int | None) -> None: ...

    def reject(self, run: LaneRun, sequence: int) -> None: ...

    def release(self, run: LaneRun, sequence: int) -> None: ...


class MessageOfLane(StoredMessage):
    """One message of an ordered subject, and its place.

    `attempt` counts from 1 over all consumers. `token` is the fencing token of the lane. It grows
    whenever the lane, or part of it, is granted to a consumer. A handler that stores the token with
    its writes, and refuses a smaller one, is protected from its own earlier attempts. Compare
    tokens of one partition only. `route_version` is the version of the route under which the
    message was read.
    """

    __slots__ = ()

    lane: LaneSource
    token: int
    route_version: int

    @property
    def subject(self) -> str:
        """The subject that the message was sent to."""
        return self.lane.subject

    @property
    def broker_group(self) -> str:
        """The broker group that stores the message."""
        return self.lane.broker_group

    @property
    def partition(self) -> int:
        """The physical partition; `sequence` counts in it."""
        return self.lane.partition

    @property
    def logical_partition(self) -> int:
        """The logical partition of its key, which never changes."""
        return int(self._batch.column("logical_partitions")[self._index])

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.subject}/{self.partition}/{self.sequence} attempt "
            f"{self.attempt}, {len(self.body)} bytes>"
        )


class LaneMessage(MessageOfLane):
    """A message of `OrderedMessages`, which have one verdict together."""

    __slots__ = (*CONTENT, "lane", "route_version", "token")

    def __init__(
        self,
        lane: LaneSource,
        batch: DecodedBatch,
        index: int,
        body: bytes,
        attempt: int,
        token: int,
        version: int,
    ) -> None:
        self.body = body
        self.attempt = attempt
        self.is_settled = False
        self._batch = batch
        self._index = index
        self.lane = lane
        self.token = token
        self.route_version = version


class OrderedMessage(MessageFields, MessageOfLane):
    """One message of an ordered subject. No other message of its key is handed out until this one
    is acknowledged, or parked, or has succeeded at another attempt.
    """

    __slots__ = ()

    body: bytes
    _batch: DecodedBatch
    _settler: LaneSettler

    @property
    def lane_run(self) -> LaneRun:
        """What it came with."""
        return self._settler.run

    @property
    def lane(self) -> LaneSource:  # type: ignore[override]  # read only here
        """The lane that the message came from."""
        return self._settler.run.lane

    @property
    def token(self) -> int:  # type: ignore[override]
        """The fencing token of the lane."""
        return self._settler.run.token

    @property
    def route_version(self) -> int:  # type: ignore[override]
        """The version of the route under which the message was read."""
        return self._settler.run.route_version

    @property
    def batch(self) -> DecodedBatch:
        """The batch that has the message."""
        return self._batch

    def settle_through(self, wrap: Callable[[LaneSettler], LaneSettler]) -> None:
        """Send the message's verdicts through a wrapper around the settler."""
        self._settler = wrap(self._settler)

    # --- settling ---------------------------------------------------------------------------------

    async def ack(self) -> None:
        """Acknowledge. Does not wait: acknowledgements are sent within milliseconds, together.
        `ack_sync` waits.
        """
        self.ack_later()

    async def ack_sync(self) -> None:
        """Acknowledge, and return when the acknowledgement is committed.

        Raises LaneLost if the lane went to another consumer first: the message may be delivered
        again. Raises NotConnected if no answer came in time (the verdict is sent again and again),
        ClientClosed.
        """
        self.ack_later()
        await self._settler.run.confirmed(self.pull_sequence)

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        if not self.is_settled:
            self.is_settled = True
            self._settler.ack(self.pull_sequence)

    def fail(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """The message failed: retry it after `delay` (default: the consumer's retry delays), or
        park its key, by the consumer's policy. `error`, a text or an exception, is logged. Raises
        InvalidArgument.
        """
        pause_ms = None if delay is None else delay_ms(delay)
        text = error_text(error)
        if not self.is_settled:
            if text:
                log.warning("%r failed: %s", self, text)
            self.is_settled = True
            self._settler.fail(self.pull_sequence, pause_ms)

    def reject(self, error: str | BaseException = "") -> None:
        """The message failed, and no other attempt will help: its key is parked immediately with
        all later messages of the key, regardless of the consumer's `on_failure`. `qmq dlq` shows
        and replays parked keys. `error` is logged. Raises InvalidArgument.
        """
        text = error_text(error)
        if not self.is_settled:
            log.warning(
                "%r was rejected, and its key is parked: %s", self, text or "no reason given"
            )
            self.is_settled = True
            self._settler.reject(self.pull_sequence)

    def release(self) -> None:
        """Give the message back untouched: it is handed out again, before later ones of its key,
        and `attempt` does not grow.
        """
        if not self.is_settled:
            self.is_settled = True
            self._settler.release(self.pull_sequence)


class LaneRun(AckRange):
    """Messages of one batch that a lane delivered to a consumer that reads one by one, and their
    settler.

    A run is read *in sequence* while one task works through it, one message after another: no
    message has a cell then, and acknowledgements are gathered as ranges. Otherwise it is *divided*:
    each message has a cell, which is in `working` from the moment when the message is handed out
    until it has a verdict.

    `offset`, `pull` and `count` are the index, the sequence and the number of the messages that
    were not handed out, as `ReadyMessages` wants them. `cell` is that of all messages without a
    verdict, as long as the run is not divided.
    """

    __slots__ = (
        "_decided",
        "_verdicts",
        "attempt",
        "batch",
        "cell",
        "count",
        "indices",
        "is_in_sequence",
        "lane",
        "offset",
        "pull",
        "route_version",
        "token",
        "unsettled",
        "working",
    )

    def __init__(
        self,
        verdicts: RunVerdicts,
        lane: LaneSource,
        cell: Cell,
        batch: DecodedBatch,
        indices: Sequence[int],
        token: int,
        version: int,
    ) -> None:
        super().__init__()
        self._verdicts = verdicts
        self.lane, self.cell, self.batch, self.indices = lane, cell, batch, indices
        self.token, self.route_version, self.attempt = token, version, cell.attempt
        self.offset, self.count = indices[0], len(indices)
        self.pull = self.unsettled = batch.view.base_sequence + indices[0]
        """`unsettled`: in sequence, the first message without a verdict."""
        self.is_in_sequence = False
        self.working: dict[int, Cell] = {}
        """By sequence."""
        self._decided: list[Cell] = []
        """The cells of messages that are acknowledged or parked."""

    @property
    def run(self) -> LaneRun:
        return self

    @property
    def settler(self) -> LaneRun:
        return self

    @property
    def is_gapless(self) -> bool:
        """Whether no other lane's messages are between these."""
        return isinstance(self.indices, range)

    def rest(self) -> Sequence[int]:
        """The indices of the messages that were not handed out."""
        return self.indices[len(self.indices) - self.count :]

    def begin(self) -> OrderedMessage:
        """Begin to read in sequence. Returns the first message."""
        message = OrderedMessage(self, self.batch, self.offset, self.attempt, self.pull)
        self.is_in_sequence = True
        self.unsettled = self.pull
        self.offset, self.pull, self.count = self.offset + 1, self.pull + 1, self.count - 1
        return message

    def keys(self, indices: Iterable[int]) -> list[bytes]:
        """The keys of the messages at these indices."""
        keys = self.batch.column("keys")
        return [keys[index] if keys else b"" for index in indices]

    def message(self, cell: Cell) -> OrderedMessage:
        """Hand out a message by its key. The body is empty if the batch is `unreadable`."""
        batch, sequence = self.batch, cell.sequence
        if batch.decoded is None and batch.readable_bodies is None:
            batch.decoded = [b""] * batch.view.count
        self.working[sequence] = cell
        index = sequence - batch.view.base_sequence
        return OrderedMessage(self, batch, index, cell.attempt, sequence)

    # --- verdicts ---------------------------------------------------------------------------------

    def begin_acks(self, sequence: int) -> None:
        """Acknowledge a message and, in sequence, gather those behind it."""
        self.settle_acks()
        if not self.is_in_sequence:
            self._verdicts.finish(self, sequence)
        elif sequence == self.unsettled:  # another one has a verdict
            count = max(1, min(ACKS_MAX, len(self.indices) // 4))
            self.gather_from(sequence, count, self._verdicts.at_end)

    def settle_range(self, _first: int, last: int) -> None:
        self._verdicts.finish_range(self, last)

    def fail(self, sequence: int, pause_ms: int | None) -> None:
        self._verdicts.fail(self, sequence, pause_ms)

    def reject(self, sequence: int) -> None:
        self._verdicts.reject(self, sequence)

    def release(self, sequence: int) -> None:
        self._verdicts.release(self, sequence)

    def decided(self, cell: Cell) -> None:
        """The cell's messages have a verdict."""
        self._decided.append(cell)

    async def confirmed(self, sequence: int) -> None:
        """Returns when the broker has the verdict. Raises as `OrderedMessage.ack_sync`."""
        self.settle_acks()
        for cell in reversed(self._decided):
            if cell.first <= sequence <= cell.sequence:
                await self.lane.confirmed(cell)
                return


@dataclass(slots=True, eq=False)
class MessageRun:
    """The messages at `indices` (ascending) of one batch."""

    lane: LaneSource
    cell: Cell
    batch: DecodedBatch
    indices: Sequence[int]
    attempt: int
    token: int
    version: int

    def split(self, count: int) -> MessageRun:
        """Keep the first `count` messages; returns the rest."""
        base, head, tail = self.batch.view.base_sequence, self.indices[:count], self.indices[count:]
        rest = self.lane.core.split(self.cell, base + head[-1], base + tail[0], count)
        self.indices = head
        return MessageRun(self.lane, rest, self.batch, tail, self.attempt, self.token, self.version)

    def message(self, place: int) -> LaneMessage:
        index = self.indices[place]
        return LaneMessage(
            self.lane,
            self.batch,
            index,
            self.batch.bodies[index],
            self.attempt,
            self.token,
            self.version,
        )

    def again(self) -> MessageRun:
        """The same messages for another attempt."""
        return replace(self, attempt=self.cell.attempt)

    def choose(self, column: list[bytes]) -> list[bytes]:
        """The values of these messages in a column of the batch."""
        indices = self.indices
        if isinstance(indices, range):
            return column if len(indices) == len(column) else column[indices.start : indices.stop]
        return list(itemgetter(*indices)(column)) if len(indices) > 1 else [column[indices[0]]]


class OrderedMessages:
    """A sequence of `LaneMessage`, made on access, with bodies and keys as lists. All are of one
    lane, in its order: working through them in order keeps the order of each key. Until they are
    settled, the lane hands out nothing else.

    `finish` is called when they are acknowledged, `fail` when they failed, with the pause in
    milliseconds before they are tried again.
    """

    __slots__ = ("_fail", "_finish", "is_settled", "runs")

    def __init__(
        self,
        runs: list[MessageRun],
        finish: Callable[[OrderedMessages], None],
        fail: Callable[[OrderedMessages, int | None], None],
    ) -> None:
        self._finish, self._fail = finish, fail
        self.runs = runs
        self.is_settled = not runs

    @property
    def partition(self) -> int:
        """The physical partition; 0 if there are no messages."""
        return self.runs[0].lane.partition if self.runs else 0

    @property
    def broker_group(self) -> str:
        """The broker group that stores them; "" if there are no messages."""
        return self.runs[0].lane.broker_group if self.runs else ""

    @property
    def token(self) -> int:
        """The fencing token of their lane, as in `OrderedMessage`; 0 if there are no messages."""
        return self.runs[0].token if self.runs else 0

    @property
    def attempt(self) -> int:
        """The number of the first message's attempt, from 1; 0 if there are no messages."""
        return self.runs[0].attempt if self.runs else 0

    def __len__(self) -> int:
        return sum([len(each.indices) for each in self.runs])

    def __iter__(self) -> Iterator[LaneMessage]:
        for each in self.runs:
            yield from map(each.message, range(len(each.indices)))

    def __getitem__(self, index: int) -> LaneMessage:
        place = index + len(self) if index < 0 else index
        for each in self.runs:
            if 0 <= place < len(each.indices):
                return each.message(place)
            place -= len(each.indices)
        raise IndexError(f"{index} of {len(self)} messages")

    @property
    def bodies(self) -> list[bytes]:
        """All bodies, without making an object for each message: the fast way."""
        if len(self.runs) == 1:
            return self.runs[0].choose(self.runs[0].batch.bodies)
        return [body for each in self.runs for body in each.choose(each.batch.bodies)]

    @property
    def keys(self) -> list[str]:
        """All keys as text. Raises UnicodeDecodeError for a key that is not
        UTF-8: see `keys_bytes`.
        """
        return list(map(bytes.decode, self.keys_bytes))

    @property
    def keys_bytes(self) -> list[bytes]:
        return [
            key
            for each in self.runs
            for key in each.choose(each.batch.column("keys") or [b""] * each.batch.view.count)
        ]

    # --- settling ---------------------------------------------------------------------------------

    async def ack(self) -> None:
        """Acknowledge all. Does not wait; see `OrderedMessage.ack`."""
        self.ack_later()

    async def ack_sync(self) -> None:
        """Acknowledge all, and return when the acknowledgement is committed.
        Raises as `OrderedMessage.ack_sync`.
        """
        self.ack_later()
        for each in self.runs:
            await each.lane.confirmed(each.cell)

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        if not self.is_settled:
            self.is_settled = True
            self._finish(self)

    def fail(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """All failed: retry them after `delay` (default: the consumer's retry delays). Their lane
        waits. `error`, a text or an exception, is logged. Raises InvalidArgument.
        """
        pause_ms = None if delay is None else delay_ms(delay)
        text = error_text(error)
        if not self.is_settled:
            if text:
                log.warning("%r failed: %s", self, text)
            self.is_settled = True
            self._fail(self, pause_ms)

    def __repr__(self) -> str:
        return f"<OrderedMessages: {len(self)} of partition {self.partition}>"


class DecompressedBatches:
    """The batches that were used last stay decompressed, up to `bytes_max` bytes. An older one is
    decompressed again for its next message. A batch whose messages are all finished is forgotten.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._sizes: dict[ref[DecodedBatch], int] = {}
        """The one that was used last is last."""
        self.bytes = 0

    def used(self, batch: DecodedBatch) -> None:
        """A message of the batch was decompressed."""
        key = ref(batch, self._forget)
        size = self._sizes.pop(key, None)
        if size is None:
            size = batch.view.bodies_bytes
            self.bytes += size
        self._sizes[key] = size
        while self.bytes > self._bytes_max and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self._forget(oldest)
            if (older := oldest()) is not None:
                older.decoded = None

    def _forget(self, key: ref[DecodedBatch]) -> None:
        self.bytes -= self._sizes.pop(key, 0)
