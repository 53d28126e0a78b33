"""The state of one lane at its consumer: held, finished and settled messages. Pure;
`lane_reader.py` does the I/O.

The pulled sequences are divided into *cells*, one for each message: the message, and the gap before
it, back to the previous message. A gap has no message of the lane that is still to be done, because
the answer to a pull names all of those. Cells cover the pulled sequences without overlap, and a
finished message settles its own cell, in any order: a settlement never covers an unfinished
message. The gap after the last message is settled when no message is open.

Messages arrive as *runs*: all delivered messages of a batch and the gaps between them, with one
cell. A run begins, finishes and fails as a whole, and can be split, or divided into a cell for each
message, while no handler has it. When a run fails, the client reports its first message to the
broker.

    WAITING ──begin──▶ WORKING ──done──▶ DONE ──settled──▶ SETTLED
       ▲                  └──failed──▶ FAILED
       └───────────due───────────────────┘

    PARKED    as DONE: set aside with its key
    VOID      from anywhere: attached again, lost

Rules:
* One request is on its way at a time; messages that finish meanwhile go with the next one, joined
  to ranges. A request whose answer is lost is sent again: settling twice is harmless.
* A lane is finished when its end was pulled and every settlement is answered. Then everything up to
  and including the command message is committed as done.
* A void cell is ignored, with any result of its handler. Cells are compared by identity: the same
  sequence may come again under a new token.
* `on_failure="block"`: while a message of the lane waits for another try, no other message of the
  lane is begun. "park": only its key waits, and after `attempts_max` failures the key is parked,
  with all its later messages.

Worked example: pulled from 10, next 20, messages 12 and 15: cells [10, 12] and [13, 15], then the
gap [16, 19]. 15 finishes first: DONE 13 to 15. 12 finishes, nothing is open: DONE 10 to 12 and 16
to 19.

The answer to a pull has ranges, and the whole batches that contain them. A run goes over any number
of ranges of its batch. It ends where the attempt changes, and messages of parked keys are separate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple

from qmq.client.consuming.message import DecodedBatch, ReceivedBatches
from qmq.errors import InvalidArgument, ProtocolViolation
from qmq.wire import frame_payloads as wire
from qmq.wire.frame_payloads import LaneSettlement, LaneVerdict

ATTEMPTS_MAX: Final = 5
RETRY_MS: Final = (1_000, 5_000, 10_000, 30_000, 60_000)
SETTLEMENTS_MAX: Final = 4_000
"""Ranges in one request, some 100 KB."""


class LaneState(Enum):
    """The state of a message. The module shows the transitions."""

    WAITING = "waiting"
    WORKING = "working"
    FAILED = "failed"
    """The handler failed; the message is retried when it is due."""
    DONE = "done"
    """The broker has not answered the settlement yet."""
    PARKED = "parked"
    """As DONE, for a message that is parked."""
    SETTLED = "settled"
    VOID = "void"
    """This consumer no longer holds the message."""


# By these names, since looking up a member of an enum takes ten times as long, and the states of
# each message are asked several times.
_WAITING: Final = LaneState.WAITING
_WORKING: Final = LaneState.WORKING
_DONE: Final = LaneState.DONE
_SETTLED: Final = LaneState.SETTLED
_OPEN: Final = (LaneState.WAITING, LaneState.WORKING, LaneState.FAILED)


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """The policy for failed handlers. Raises InvalidArgument."""

    on_failure: str = "block"
    attempts_max: int = ATTEMPTS_MAX
    """With "park": failures after which a message's key is parked."""
    retry_ms: Sequence[int] = RETRY_MS
    """The pause after the first failure, the second, and so on; the last one repeats."""

    def __post_init__(self) -> None:
        if self.on_failure not in ("block", "park"):
            raise InvalidArgument(f"on_failure is 'block' or 'park', not {self.on_failure!r}")
        if self.attempts_max < 1 or not self.retry_ms or min(self.retry_ms) < 0:
            raise InvalidArgument(
                "attempts_max is 1 or more, and there is at least one retry delay, none of "
                "them negative"
            )

    @property
    def blocks(self) -> bool:
        """Whether a failed message blocks all of its lane."""
        return self.on_failure == "block"

    def pause_ms(self, failures: int) -> int:
        """How long a message waits after `failures` failures."""
        return self.retry_ms[min(failures, len(self.retry_ms)) - 1]


class LaneArrival(NamedTuple):
    """A run of `count` messages from a pull, or one message of a parked key, which has `key`.

    `sequence` is that of the last one, the first one is `span` before it. `attempt` is 1 plus the
    failures that the broker knows of. `size` is its part of its batch in bytes.
    """

    sequence: int
    key: bytes | None
    attempt: int
    span: int = 0
    count: int = 1  # type: ignore[assignment]
    size: int = 0


@dataclass(slots=True, eq=False)
class Cell:
    """A message, or a run, which has no key, and the gap from `first` to it. See `LaneArrival`."""

    first: int
    sequence: int
    key: bytes | None
    attempt: int
    span: int = 0
    count: int = 1
    size: int = 0
    state: LaneState = LaneState.WAITING
    due_ms: int = 0
    """When a failed message may be retried."""
    is_seen: bool = False
    """Whether a handler got the message."""

    @property
    def head(self) -> int:
        """The sequence of its first message."""
        return self.sequence - self.span


class LanePiece(NamedTuple):
    """A settlement on its way, and the cells that it is about; a stretch has none."""

    settlement: LaneSettlement
    cells: Sequence[Cell]


@dataclass(slots=True, eq=False)
class LaneRequest:
    """The settlements of one LANE_SETTLE."""

    settlements: list[LaneSettlement] = field(default_factory=list)
    pieces: list[LanePiece] = field(default_factory=list)


class LaneCore:
    """The state of one lane. Times are milliseconds of a monotonic clock."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy = policy
        self.position = -1
        """The sequence to pull from; -1 before the lane was attached."""
        self.is_end = False
        """Whether the end of the lane was pulled."""
        self.open = 0
        """The number of messages that are neither finished nor void."""
        self.open_bytes = 0
        """The bytes of open messages."""
        self.working = 0
        """The number of open messages that handlers have."""
        self.parked: set[bytes] = set()
        self.failing: set[Cell] = set()
        """Messages that failed and are not over."""
        self._cells: dict[int, Cell] = {}
        self._covered = -1
        self._fresh: list[LanePiece] = []
        self._done: list[Cell] = []
        """Cells that are DONE and in no request yet.
        They become ranges when the next request is made.
        """
        self._flying: LaneRequest | None = None
        self._is_released = False

    # --- the session with the broker --------------------------------------------------------------

    def attached(self, position: int, *, is_resumed: bool, parked: Iterable[bytes]) -> list[Cell]:
        """The broker granted the lane. Returns the cells that became void: none if the session is
        resumed, else all.
        """
        lost: list[Cell] = []
        self.detached()
        if not is_resumed or self.position < 0:
            lost = self.lost()
            self.position = self._covered = position
        unsure = [cell.key for cell in self._cells.values() if cell.state is LaneState.PARKED]
        self.parked = {*parked, *[key for key in unsure if key is not None]}
        return lost

    def detached(self) -> None:
        """The session has ended: unanswered settlements will be sent again. Harmless to repeat."""
        if self._flying is not None:
            self._fresh += self._flying.pieces
            self._flying = None

    def lost(self) -> list[Cell]:
        """The token is not valid any more, and everything held is void. Returns the cells that were
        not settled.
        """
        cells = list(self._cells.values())
        for cell in cells:
            cell.state = LaneState.VOID
        self._cells.clear()
        self.failing.clear()
        self._fresh.clear()
        self._done.clear()
        self._flying = None
        self.parked = set()
        self.open = self.working = self.open_bytes = 0
        self.position = self._covered = -1
        self.is_end = False
        return cells

    # --- messages in ------------------------------------------------------------------------------

    def delivered(
        self, arrivals: Iterable[LaneArrival], next_sequence: int, *, is_end: bool
    ) -> list[Cell]:
        """Take the answer to a pull from `position`: all messages to be done before
        `next_sequence`. Returns a cell for each arrival; those of parked keys are PARKED already (a
        run contains none). After `release` no messages are taken. Raises ProtocolViolation.
        """
        if self._is_released:
            return []
        made: list[Cell] = []
        at, first = self.position, self._covered
        messages = bytes_in_all = 0
        for sequence, key, attempt, span, count, size in arrivals:
            if not at <= sequence - span <= sequence < next_sequence:
                raise ProtocolViolation(
                    f"received sequence {sequence - span} instead of one from {at} to "
                    f"{next_sequence - 1}"
                )
            made.append(Cell(first, sequence, key, attempt, span, count, size))
            at = first = sequence + 1
            messages += count
            bytes_in_all += size
        if next_sequence < self.position:
            raise ProtocolViolation(
                f"a pull from sequence {self.position} continues at {next_sequence}, which "
                "is before it"
            )
        self.position, self.is_end = next_sequence, is_end
        if made:
            self._covered = made[-1].sequence + 1
        self._cells.update(zip(map(_sequence, made), made, strict=True))
        self.open += messages
        self.open_bytes += bytes_in_all
        if self.parked:
            for cell in made:
                if cell.key in self.parked:
                    self._set_aside(cell)
        return made

    def split(self, cell: Cell, last: int, head: int, count: int) -> Cell:
        """Split a waiting run after its first `count` messages, of which `last` is the last; `head`
        is the first of the rest. Returns the cell of the rest. An unsent earlier failure stays with
        the first message.
        """
        assert cell.state is LaneState.WAITING
        assert 0 < count < cell.count
        assert cell.head <= last < head <= cell.sequence
        rest = Cell(
            last + 1,
            cell.sequence,
            cell.key,
            cell.attempt,
            cell.sequence - head,
            cell.count - count,
            is_seen=cell.is_seen,
        )
        rest.size = cell.size * rest.count // cell.count
        cell.sequence, cell.span, cell.count, cell.size = (
            last,
            last - cell.head,
            count,
            cell.size - rest.size,
        )
        self._cells[rest.sequence], self._cells[last] = rest, cell
        if cell in self.failing:
            self.failing.add(rest)
        return rest

    def divide(self, cell: Cell, sequences: Sequence[int], keys: Sequence[bytes]) -> list[Cell]:
        """Replace a waiting run, which never failed, by a cell for each of its messages."""
        assert cell.state is LaneState.WAITING
        assert cell.count == len(sequences)
        del self._cells[cell.sequence]
        size, attempt, first = cell.size // cell.count, cell.attempt, cell.first
        made: list[Cell] = []
        for sequence, key in zip(sequences, keys, strict=True):
            made.append(Cell(first, sequence, key, attempt, 0, 1, size))
            first = sequence + 1
        made[-1].size += cell.size - size * cell.count
        self._cells.update(zip(sequences, made, strict=True))
        return made

    # --- from the handlers ------------------------------------------------------------------------

    def begin(self, cell: Cell) -> bool:
        """A handler gets the message. False if it must not,
        because the message is void or was parked.
        """
        if cell.state is not _WAITING:
            return False
        cell.state = _WORKING
        cell.is_seen = True
        self.working += cell.count
        return True

    def done(self, cell: Cell) -> bool:
        """The handler succeeded. False if the message is void."""
        if cell.state is not _WORKING:
            return False
        # `_close`, without a call: most messages end here.
        cell.state = _DONE
        count = cell.count
        self.open -= count
        self.working -= count
        self.open_bytes -= cell.size
        if self.failing:
            self.failing.discard(cell)
        self._done.append(cell)
        return True

    def failed(self, cell: Cell, now_ms: int, pause_ms: int | None = None) -> bool:
        """The handler failed: the message becomes FAILED or, by the policy, PARKED with its key.
        False if it is void.
        """
        if cell.state is not LaneState.WORKING:
            return False
        if not self.policy.blocks and cell.attempt >= self.policy.attempts_max:
            self._park(cell.key)
            return True
        cell.state = LaneState.FAILED
        self.working -= cell.count
        cell.due_ms = now_ms + (
            self.policy.pause_ms(cell.attempt) if pause_ms is None else pause_ms
        )
        self.failing.add(cell)
        self._fresh.append(_piece(cell.head, cell.head, LaneVerdict.FAILED, cell, cell.attempt))
        cell.attempt += 1
        return True

    def rejected(self, cell: Cell) -> bool:
        """No other attempt will help: the key is PARKED now. False if this consumer no longer holds
        the message.
        """
        if cell.state is not LaneState.WORKING:
            return False
        self._park(cell.key)
        return True

    def put_back(self, cell: Cell) -> bool:
        """The handler was cancelled: the message waits as if it had not been begun.
        False if it is void.
        """
        if cell.state is not LaneState.WORKING:
            return False
        cell.state = LaneState.WAITING
        self.working -= cell.count
        return True

    def _park(self, key: bytes | None) -> None:
        assert key is not None
        self.parked.add(key)
        for cell in [
            each for each in self._cells.values() if each.key == key and each.state in _OPEN
        ]:
            self._set_aside(cell)

    def _set_aside(self, cell: Cell) -> None:
        self._close(cell, LaneState.PARKED)
        if cell.first < cell.sequence:
            self._fresh.append(_piece(cell.first, cell.sequence - 1, LaneVerdict.DONE, None))
        self._fresh.append(_piece(cell.sequence, cell.sequence, LaneVerdict.PARKED, cell))

    def _close(self, cell: Cell, state: LaneState) -> None:
        self.open -= cell.count
        self.open_bytes -= cell.size
        self.working -= cell.count if cell.state is LaneState.WORKING else 0
        self.failing.discard(cell)
        cell.state = state

    # --- another try ------------------------------------------------------------------------------

    @property
    def is_blocked(self) -> bool:
        """Whether only failed messages of the lane may be begun."""
        return self.policy.blocks and bool(self.failing)

    def next_due_ms(self) -> int | None:
        """When the next failed message may be retried."""
        return min(
            (cell.due_ms for cell in self.failing if cell.state is LaneState.FAILED), default=None
        )

    def due(self, now_ms: int) -> list[Cell]:
        """The failed messages whose pause has ended; they are WAITING now. The lane stays blocked
        until they succeed.
        """
        found = [
            cell
            for cell in self.failing
            if cell.state is LaneState.FAILED and cell.due_ms <= now_ms
        ]
        for cell in found:
            cell.state = LaneState.WAITING
        return sorted(found, key=lambda cell: cell.sequence)

    # --- settling ---------------------------------------------------------------------------------

    def take(self) -> LaneRequest | None:
        """The next request for the broker; None while an answer is outstanding, or if there is
        nothing to settle.
        """
        if self._flying is not None:
            return None
        if self.open == 0 and self._covered < self.position:
            self._fresh.append(_piece(self._covered, self.position - 1, LaneVerdict.DONE, None))
            self._covered = self.position
        if self._done:
            self._fresh += _runs(self._done)
            self._done = []
        request = LaneRequest()
        self._fresh = sorted(
            [each for each in self._fresh if not _is_outdated(each)],
            key=lambda each: each.settlement.first,
        )
        for taken, piece in enumerate(self._fresh):
            if not _joined(request.settlements, piece.settlement):
                if len(request.settlements) == SETTLEMENTS_MAX:
                    self._fresh = self._fresh[taken:]
                    break
                request.settlements.append(piece.settlement)
            request.pieces.append(piece)
        else:
            self._fresh = []
        if not request.pieces:
            return None
        self._flying = request
        return request

    def settled(self, request: LaneRequest) -> list[Cell]:
        """The request was answered, so its settlements are committed. Returns the finished cells;
        none for a request of an old token.
        """
        if request is not self._flying:
            return []
        self._flying = None
        over = [
            cell
            for settlement, cells in request.pieces
            if settlement.verdict != LaneVerdict.FAILED
            for cell in cells
        ]
        known = self._cells
        for cell in over:
            cell.state = _SETTLED
            del known[cell.sequence]
        return over

    @property
    def has_verdicts(self) -> bool:
        """Whether there are settlements that no request has."""
        return bool(self._fresh or self._done or (self.open == 0 and self._covered < self.position))

    @property
    def is_answered(self) -> bool:
        """Whether the broker has answered all settlements."""
        return self._flying is None and not self.has_verdicts

    @property
    def is_finished(self) -> bool:
        """Whether the whole lane is done and committed, to its end."""
        return self.is_end and not self._is_released and self.open == 0 and self.is_answered

    # --- giving it up -----------------------------------------------------------------------------

    def release(self, *, is_final: bool = False) -> list[Cell]:
        """The lane goes to another consumer: nothing more is pulled, and waiting messages become
        void. With `is_final`, messages in a handler become void, too; finished ones are still
        settled. Returns the cells that became void.
        """
        self._is_released = True
        dropped = [
            cell
            for cell in self._cells.values()
            if cell.state in _OPEN and (is_final or cell.state is not LaneState.WORKING)
        ]
        for cell in dropped:
            self._close(cell, LaneState.VOID)
            del self._cells[cell.sequence]
        return dropped

    def check(self) -> None:
        """The whole invariant, for tests."""
        cells = sorted(self._cells.values(), key=lambda cell: cell.sequence)
        assert [cell.sequence for cell in cells] == sorted(self._cells)
        assert all(
            cell.first <= cell.head <= cell.sequence and 0 < cell.count <= cell.span + 1
            for cell in cells
        )
        assert all(a.sequence < b.first for a, b in pairwise(cells))
        assert all(cell.state not in (LaneState.SETTLED, LaneState.VOID) for cell in cells)
        assert self.open == sum(cell.count for cell in cells if cell.state in _OPEN)
        assert self.open_bytes == sum(cell.size for cell in cells if cell.state in _OPEN)
        assert self.working == sum(cell.count for cell in cells if cell.state is LaneState.WORKING)
        assert all(cell.state in _OPEN for cell in self.failing)
        assert self._covered <= self.position


_first = attrgetter("first")
_sequence = attrgetter("sequence")


def _piece(
    first: int, last: int, verdict: LaneVerdict, cell: Cell | None, argument: int = 0
) -> LanePiece:
    return LanePiece(
        LaneSettlement(first, last, verdict, argument), () if cell is None else (cell,)
    )


def _runs(done: list[Cell]) -> list[LanePiece]:
    """Cells that are done, those that touch in one piece."""
    done.sort(key=_first)
    runs: list[list[Cell]] = []
    run: list[Cell] = []
    following = -1
    for cell in done:
        if cell.first != following:
            run = []
            runs.append(run)
        run.append(cell)
        following = cell.sequence + 1
    return [
        LanePiece(LaneSettlement(each[0].first, each[-1].sequence, LaneVerdict.DONE, 0), each)
        for each in runs
    ]


def _is_outdated(piece: LanePiece) -> bool:
    """A failure need not be sent if the message failed again or was finished since."""
    settlement, cells = piece
    if settlement.verdict != LaneVerdict.FAILED:
        return False
    return any(cell.state not in _OPEN or settlement.argument + 1 < cell.attempt for cell in cells)


def _joined(settlements: list[LaneSettlement], each: LaneSettlement) -> bool:
    """Join a settlement to the last one, if both are DONE and adjacent."""
    last = settlements[-1] if settlements else None
    if (
        last is None
        or last.verdict != LaneVerdict.DONE
        or each.verdict != LaneVerdict.DONE
        or last.last + 1 != each.first
    ):
        return False
    settlements[-1] = last._replace(last=each.last)
    return True


class LanePart(NamedTuple):
    """Messages of one batch."""

    batch: DecodedBatch
    indices: Sequence[int]


class DeliveredRuns(NamedTuple):
    """The content of a delivery in runs. `parts` has the messages of each arrival."""

    next_sequence: int
    is_end: bool
    arrivals: list[LaneArrival]
    parts: list[LanePart]


def unpack_delivery(
    payload: memoryview | bytes,
    session: int,
    parked: Collection[bytes],
    received: ReceivedBatches,
    server: str,
) -> DeliveredRuns:
    """Parse LANE_MESSAGES of a session, which `server` sent; `parked` are the parked keys.
    Raises ProtocolViolation, CorruptBatch.
    """
    delivery, batches = _open(payload, session, received, server)
    arrivals: list[LaneArrival] = []
    parts: list[LanePart] = []
    for batch, indices, attempt in _gather(delivery.ranges, batches):
        for key, chosen in _without_parked(batch, indices, parked):
            base = batch.view.base_sequence
            size = batch.message_bytes * len(chosen)
            arrivals.append(
                LaneArrival(
                    base + chosen[-1], key, attempt, chosen[-1] - chosen[0], len(chosen), size
                )
            )
            parts.append(LanePart(batch, chosen))
    return DeliveredRuns(delivery.next_sequence, delivery.is_end, arrivals, parts)


def _open(
    payload: memoryview | bytes, session: int, received: ReceivedBatches, server: str
) -> tuple[wire.LaneDelivery, list[DecodedBatch]]:
    delivery, at = wire.unpack_lane_delivery(payload)
    if delivery.session != session:
        raise ProtocolViolation(
            f"received messages for lane session {delivery.session} instead of {session}"
        )
    return delivery, received.read(payload, at, delivery.batches, delivery.ranges, server)


def _find(each: wire.Range, batches: list[DecodedBatch]) -> tuple[DecodedBatch, int]:
    """The batch of a range, and the range's first place in it."""
    if each.batch >= len(batches):
        raise ProtocolViolation(f"{each} is in no batch of the answer")
    batch = batches[each.batch]
    offset = each.first_sequence - batch.view.base_sequence
    if not each.count or not 0 <= offset <= batch.view.count - each.count:
        raise ProtocolViolation(f"{each} is outside its batch")
    return batch, offset


def _gather(
    ranges: list[wire.Range], batches: list[DecodedBatch]
) -> Iterator[tuple[DecodedBatch, Sequence[int], int]]:
    """(batch, places, attempt): adjacent ranges with the same batch and attempt together."""
    begun: DecodedBatch | None = None
    indices: list[int] | range = range(0)
    attempt = 0
    for each in ranges:
        batch, offset = _find(each, batches)
        more = range(offset, offset + each.count)
        if batch is begun and each.attempt == attempt:
            if more[0] <= indices[-1]:
                raise ProtocolViolation(f"{each} is not after the range before it")
            if isinstance(indices, range):
                indices = list(indices)
            indices += more
            continue
        if begun is not None:
            yield begun, indices, attempt
        begun, indices, attempt = batch, more, each.attempt
    if begun is not None:
        yield begun, indices, attempt


def _without_parked(
    batch: DecodedBatch, indices: Sequence[int], parked: Collection[bytes]
) -> Iterator[tuple[bytes | None, Sequence[int]]]:
    """Runs of messages that may be handed out (without key), and the messages of parked keys, each
    with its key.
    """
    keys: list[bytes] = (batch.column("keys") if parked else None) or []
    begin = 0
    for at in [at for at, index in enumerate(indices) if keys[index] in parked] if keys else ():
        if begin < at:
            yield None, indices[begin:at]
        yield keys[indices[at]], indices[at : at + 1]
        begin = at + 1
    if begin < len(indices):
        yield None, indices[begin:]


def unpack_keys(parked: list[str]) -> list[bytes]:
    """Parse the parked keys of LANE_ATTACHED. Raises ProtocolViolation."""
    try:
        return [bytes.fromhex(each) for each in parked]
    except (ValueError, TypeError):
        raise ProtocolViolation(
            "LANE_ATTACHED names parked keys that are no hexadecimal digits"
        ) from None
