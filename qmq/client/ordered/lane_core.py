"""What a consumer knows of one lane: what it holds, what it has finished, what it may tell the broker. Pure; `lane_reader.py` carries it
out.

The sequences that were pulled are cut into *cells*, one for each message: the message, and the stretch before it, back to the message
before. A stretch holds nothing that is the lane's and still to be done, because a pull's answer names everything that is. So cells tile
what was pulled, and a finished message settles its cell, in whatever order messages finish: no settlement ever covers a message that is not
finished. What lies behind the last message is a stretch without one; it is settled when no message is open.

Who reads in bulk has one cell for a *run*, many messages with everything between them; it is begun, finished and failed as a whole, and can
be split while nobody has it. Of a run that failed the broker is told about its first message.

    WAITING ──begin──▶ WORKING ──done──▶ DONE ──settled──▶ SETTLED         (PARKED as DONE: set aside with its key)
       ▲                  └──failed──▶ FAILED
       └───────────due───────────────────┘                                 attached anew, lost: VOID from anywhere

Rules:
* One request is on its way at a time; what finishes meanwhile goes with the next, joined to ranges. A request whose answer is lost is sent
  again: what is done twice is done.
* A lane is finished when its end was pulled and the answer to every settlement has come. Then everything up to and including the command
  message is committed as done.
* A void cell counts no more, whatever its handler says. Cells are compared by identity: the same sequence may come again under a new token.
* `on_failure="block"`: while a message of the lane waits for another try nothing else of the lane is begun. "park": only its key waits, and
  after `attempts_max` failures the key is set aside, with everything that follows for it.

Worked example: pulled from 10, next 20, messages 12 and 15: cells [10, 12] and [13, 15], then the stretch [16, 19]. 15 finishes first: DONE
13 to 15. 12 finishes, nothing is open: DONE 10 to 12 and 16 to 19.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple

from qmq.errors import InvalidArgument, ProtocolViolation
from qmq.wire.frame_payloads import LaneSettlement, LaneVerdict

ATTEMPTS_MAX: Final = 5
RETRY_MS: Final = (1_000, 5_000, 10_000, 30_000, 60_000)
SETTLEMENTS_MAX: Final = 4_000
"""Ranges in one request: some 100 KB."""


class LaneState(Enum):
    """What became of a message. The module draws the transitions."""

    WAITING = "waiting"
    WORKING = "working"
    FAILED = "failed"
    """To be tried again when it is due."""
    DONE = "done"
    """The broker is to be told, or its answer has not come."""
    PARKED = "parked"
    """The same, for a message that is set aside."""
    SETTLED = "settled"
    VOID = "void"
    """Not this consumer's any more."""


# By these names, since looking up a member of an enum takes ten times as long, and the states of each message are asked several times.
_WAITING: Final = LaneState.WAITING
_WORKING: Final = LaneState.WORKING
_DONE: Final = LaneState.DONE
_SETTLED: Final = LaneState.SETTLED
_OPEN: Final = (LaneState.WAITING, LaneState.WORKING, LaneState.FAILED)


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What happens when a handler fails. Raises InvalidArgument."""

    on_failure: str = "block"
    attempts_max: int = ATTEMPTS_MAX
    """With "park": how often a message may fail before its key is set aside."""
    retry_ms: Sequence[int] = RETRY_MS
    """The pause after the first failure, the second, and so on; the last one holds for all that follow."""

    def __post_init__(self) -> None:
        if self.on_failure not in ("block", "park"):
            raise InvalidArgument(f"on_failure is 'block' or 'park', not {self.on_failure!r}")
        if self.attempts_max < 1 or not self.retry_ms or min(self.retry_ms) < 0:
            raise InvalidArgument("attempts_max is 1 or more, and there is at least one retry delay, none of them negative")

    @property
    def blocks(self) -> bool:
        """Whether a failed message has all of its lane wait."""
        return self.on_failure == "block"

    def pause_ms(self, failures: int) -> int:
        """How long a message rests after so many failures."""
        return self.retry_ms[min(failures, len(self.retry_ms)) - 1]


class LaneArrival(NamedTuple):
    """A message of the lane as a pull brought it. `attempt` is 1 and the failures that the broker knows of.

    Or a run: `count` messages, of which `sequence` is the last, and the first lies `span` before it; then the key is empty. `size`: what
    it takes, its part of its batch in bytes.
    """

    sequence: int
    key: bytes
    attempt: int
    span: int = 0
    count: int = 1  # type: ignore[assignment]
    size: int = 0


Arrived = tuple[int, bytes, int, int, int, int]
"""What a `LaneArrival` says, in its order: a plain tuple costs a fifth of a named one, and there is one for each message."""


@dataclass(slots=True, eq=False)
class Cell:
    """A message, or a run of them, and the stretch from `first` to it. See `LaneArrival`."""

    first: int
    sequence: int
    key: bytes
    attempt: int
    span: int = 0
    count: int = 1
    size: int = 0
    state: LaneState = LaneState.WAITING
    due_ms: int = 0
    """When it was failed: not before then again."""
    is_seen: bool = False
    """Whether a handler was given it."""

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
    """Settlements to be sent in one LANE_SETTLE."""

    settlements: list[LaneSettlement] = field(default_factory=list)
    pieces: list[LanePiece] = field(default_factory=list)


class LaneCore:
    """Times are milliseconds of a clock that never goes back."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy = policy
        self.position = -1
        """Pull from here; -1 before the lane was ever attached."""
        self.is_end = False
        """Nothing will ever follow what was pulled."""
        self.open = 0
        """Messages that are neither finished nor void."""
        self.open_bytes = 0
        """What they take."""
        self.working = 0
        """Of these, the ones that handlers have."""
        self.parked: set[bytes] = set()
        self.failing: set[Cell] = set()
        """Messages that failed and are not over."""
        self._cells: dict[int, Cell] = {}
        self._covered = -1
        self._fresh: list[LanePiece] = []
        self._done: list[Cell] = []
        """Cells that are DONE and in no piece yet: they become ranges when there is a request to send."""
        self._flying: LaneRequest | None = None
        self._is_released = False

    # --- the session with the broker -----------------------------------------------------------------------------------

    def attached(self, position: int, *, is_resumed: bool, parked: Iterable[bytes]) -> list[Cell]:
        """The broker gave the lane, or gave it back. The cells that ceased to be ours: none if it is resumed, else all."""
        lost: list[Cell] = []
        self.detached()
        if not is_resumed or self.position < 0:
            lost = self.lost()
            self.position = self._covered = position
        unsure = {cell.key for cell in self._cells.values() if cell.state is LaneState.PARKED}
        self.parked = set(parked) | unsure
        return lost

    def detached(self) -> None:
        """No answer comes any more: what was under way is said again. Harmless to repeat."""
        if self._flying is not None:
            self._fresh += self._flying.pieces
            self._flying = None

    def lost(self) -> list[Cell]:
        """The token is void: so is everything that we hold. The cells that were not settled."""
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

    # --- messages in ---------------------------------------------------------------------------------------------------

    def delivered(self, arrivals: Iterable[Arrived], next_sequence: int, *, is_end: bool) -> list[Cell]:
        """What a pull from `position` brought: everything to be done before `next_sequence`. A cell for each; those of parked keys are
        PARKED already (a run has none in it). What comes after `release` is not taken. Raises ProtocolViolation.
        """
        if self._is_released:
            return []
        made: list[Cell] = []
        at, first = self.position, self._covered
        messages = bytes_in_all = 0
        for sequence, key, attempt, span, count, size in arrivals:
            if not at <= sequence - span <= sequence < next_sequence:
                raise ProtocolViolation(f"sequence {sequence - span} came, where {at} to {next_sequence - 1} were to come")
            made.append(Cell(first, sequence, key, attempt, span, count, size))
            at = first = sequence + 1
            messages += count
            bytes_in_all += size
        if next_sequence < self.position:
            raise ProtocolViolation(f"a pull from {self.position} led back to {next_sequence}")
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
        """Cut a run that waits behind its first `count` messages, of which `last` is the last; `head` is the first of the rest, which has
        a cell of its own now. What the broker is to be told of an earlier failure stays with the first message.
        """
        assert cell.state is LaneState.WAITING
        assert 0 < count < cell.count
        assert cell.head <= last < head <= cell.sequence
        rest = Cell(last + 1, cell.sequence, cell.key, cell.attempt, cell.sequence - head, cell.count - count, is_seen=cell.is_seen)
        rest.size = cell.size * rest.count // cell.count
        cell.sequence, cell.span, cell.count, cell.size = last, last - cell.head, count, cell.size - rest.size
        self._cells[rest.sequence], self._cells[last] = rest, cell
        if cell in self.failing:
            self.failing.add(rest)
        return rest

    # --- from the handlers ---------------------------------------------------------------------------------------------

    def begin(self, cell: Cell) -> bool:
        """A handler is given the message; False if it must not be, because it is void or was parked."""
        if cell.state is not _WAITING:
            return False
        cell.state = _WORKING
        cell.is_seen = True
        self.working += cell.count
        return True

    def done(self, cell: Cell) -> bool:
        """The handler succeeded; False if the message is not ours any more."""
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
        """The handler failed: the message is FAILED now, or, by the policy, its key is PARKED. False if it is not ours any more."""
        if cell.state is not LaneState.WORKING:
            return False
        if not self.policy.blocks and cell.attempt >= self.policy.attempts_max:
            self._park(cell.key)
            return True
        cell.state = LaneState.FAILED
        self.working -= cell.count
        cell.due_ms = now_ms + (self.policy.pause_ms(cell.attempt) if pause_ms is None else pause_ms)
        self.failing.add(cell)
        self._fresh.append(_piece(cell.head, cell.head, LaneVerdict.FAILED, cell, cell.attempt))
        cell.attempt += 1
        return True

    def rejected(self, cell: Cell) -> bool:
        """No other try will help: the key is PARKED now. False if the message is not ours any more."""
        if cell.state is not LaneState.WORKING:
            return False
        self._park(cell.key)
        return True

    def put_back(self, cell: Cell) -> bool:
        """The handler never came to an end: the message waits as if it had not been begun. False if it is not ours any more."""
        if cell.state is not LaneState.WORKING:
            return False
        cell.state = LaneState.WAITING
        self.working -= cell.count
        return True

    def _park(self, key: bytes) -> None:
        self.parked.add(key)
        for cell in [each for each in self._cells.values() if each.key == key and each.state in _OPEN]:
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

    # --- another try ---------------------------------------------------------------------------------------------------

    @property
    def is_blocked(self) -> bool:
        """Whether nothing of the lane may be begun but what failed."""
        return self.policy.blocks and bool(self.failing)

    def next_due_ms(self) -> int | None:
        """When the next failed message may be tried again."""
        return min((cell.due_ms for cell in self.failing if cell.state is LaneState.FAILED), default=None)

    def due(self, now_ms: int) -> list[Cell]:
        """Failed messages whose pause is over; they are WAITING now. The lane stays blocked until they succeed."""
        found = [cell for cell in self.failing if cell.state is LaneState.FAILED and cell.due_ms <= now_ms]
        for cell in found:
            cell.state = LaneState.WAITING
        return sorted(found, key=lambda cell: cell.sequence)

    # --- settling ------------------------------------------------------------------------------------------------------

    def take(self) -> LaneRequest | None:
        """What the broker is to be told now; None while an answer is awaited, or if there is nothing to tell."""
        if self._flying is not None:
            return None
        if self.open == 0 and self._covered < self.position:
            self._fresh.append(_piece(self._covered, self.position - 1, LaneVerdict.DONE, None))
            self._covered = self.position
        if self._done:
            self._fresh += _runs(self._done)
            self._done = []
        request = LaneRequest()
        self._fresh = sorted([each for each in self._fresh if not _is_outdated(each)], key=lambda each: each.settlement.first)
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
        """The answer came: it is committed. The cells that are over; none for a request of a token that is void."""
        if request is not self._flying:
            return []
        self._flying = None
        over = [cell for settlement, cells in request.pieces if settlement.verdict != LaneVerdict.FAILED for cell in cells]
        known = self._cells
        for cell in over:
            cell.state = _SETTLED
            del known[cell.sequence]
        return over

    @property
    def is_told(self) -> bool:
        """Whether the broker has answered everything that there is to tell."""
        return self._flying is None and not self._fresh and not self._done and (self.open > 0 or self._covered >= self.position)

    @property
    def is_finished(self) -> bool:
        """Whether all of the lane, to its end, is done and committed."""
        return self.is_end and not self._is_released and self.open == 0 and self.is_told

    # --- giving it up --------------------------------------------------------------------------------------------------

    def release(self, *, is_final: bool = False) -> list[Cell]:
        """The lane goes to another: what no handler has is void now, and nothing more is pulled. The cells that are void now; the rest may
        finish, unless this is final: then what handlers have is void too, and only what is finished is still told.
        """
        self._is_released = True
        dropped = [cell for cell in self._cells.values() if cell.state in _OPEN and (is_final or cell.state is not LaneState.WORKING)]
        for cell in dropped:
            self._close(cell, LaneState.VOID)
            del self._cells[cell.sequence]
        return dropped

    def check(self) -> None:
        """The whole invariant, for tests."""
        cells = sorted(self._cells.values(), key=lambda cell: cell.sequence)
        assert [cell.sequence for cell in cells] == sorted(self._cells)
        assert all(cell.first <= cell.head <= cell.sequence and 0 < cell.count <= cell.span + 1 for cell in cells)
        assert all(a.sequence < b.first for a, b in pairwise(cells))
        assert all(cell.state not in (LaneState.SETTLED, LaneState.VOID) for cell in cells)
        assert self.open == sum(cell.count for cell in cells if cell.state in _OPEN)
        assert self.open_bytes == sum(cell.size for cell in cells if cell.state in _OPEN)
        assert self.working == sum(cell.count for cell in cells if cell.state is LaneState.WORKING)
        assert all(cell.state in _OPEN for cell in self.failing)
        assert self._covered <= self.position


_first = attrgetter("first")
_sequence = attrgetter("sequence")


def _piece(first: int, last: int, verdict: LaneVerdict, cell: Cell | None, argument: int = 0) -> LanePiece:
    return LanePiece(LaneSettlement(first, last, verdict, argument), () if cell is None else (cell,))


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
    return [LanePiece(LaneSettlement(each[0].first, each[-1].sequence, LaneVerdict.DONE, 0), each) for each in runs]


def _is_outdated(piece: LanePiece) -> bool:
    """A failure that was followed by another one, or by the end of the message, need not be told."""
    settlement, cells = piece
    if settlement.verdict != LaneVerdict.FAILED:
        return False
    return any(cell.state not in _OPEN or settlement.argument + 1 < cell.attempt for cell in cells)


def _joined(settlements: list[LaneSettlement], each: LaneSettlement) -> bool:
    """Join it to the last one, if both are DONE and touch."""
    last = settlements[-1] if settlements else None
    if last is None or last.verdict != LaneVerdict.DONE or each.verdict != LaneVerdict.DONE or last.last + 1 != each.first:
        return False
    settlements[-1] = last._replace(last=each.last)
    return True
