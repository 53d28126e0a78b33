"""The cells of the matrix, and what each must end in. docs/reference/damage.md shows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Final


class Kind(Enum):
    """The kinds of files of a replica."""

    MESSAGES = "message log"
    ACTIONS = "action log"
    CONSUME = "consume log"
    CHECKPOINT = "checkpoint"
    SCHEDULE = "schedule"
    DISPATCH = "dispatch log"
    IDENTITY = "replica.json"
    MARK = "commit mark"

    @property
    def is_of_delay_group(self) -> bool:
        """Whether only delay groups have such files."""
        return self in (Kind.SCHEDULE, Kind.DISPATCH)


class Damage(Enum):
    FLIP = "flipped bit"
    CUT = "truncated"
    CUT_TAIL = "last entry cut off"
    """Between two entries, which no file shows by itself."""
    LOST_PAGES = "unsynced pages lost"
    UNREADABLE = "unreadable (EIO)"


class Beside(Enum):
    """What happens to the master at the same time. The fault ends when the damaged replicas have been started again."""

    PAUSE = "paused"
    KILL = "killed"
    CUT_OFF = "cut off"


class End(Enum):
    """The outcome of a cell; see MEANINGS. No outcome allows a wrong message to be served."""

    WHOLE = "whole"
    REFUSED = "refused"
    PARTLY = "partly"
    SHORT = "short"
    REBUILT = "rebuilt"
    ELSEWHERE = "elsewhere"
    REPORTED = "reported"


MEANINGS: Final = {
    End.WHOLE: (
        "All replicas start without an operator, nothing acknowledged is lost, and afterwards all replicas have the same undamaged files."
    ),
    End.REFUSED: (
        "The damaged replicas do not start, or stop as masters or at a checkpoint, and say why (E401, EIO). The group serves with the "
        "other replicas if they can elect a master. After the operator has moved the folder away (or restored it, if all are damaged), "
        "the result is `whole`."
    ),
    End.PARTLY: (
        "The group serves. For messages that are damaged on all replicas, the group answers E401, which says how to skip them; a delay "
        "group counts them as unreadable. Everything else is there."
    ),
    End.SHORT: "The group serves. Messages that were only in page caches are lost; everything that was reported as flushed is there.",
    End.REBUILT: "The group serves. A damaged master answers E401 where it needs the file, until it is restarted, which rebuilds the file.",
    End.ELSEWHERE: (
        "The group serves. A damaged master does not deliver the damaged messages, and counts them; another master delivers them "
        "(`qmq transfer`)."
    ),
    End.REPORTED: "The group serves everything; the scrubber reports damage that no replica can repair, where a checkpoint replaces it.",
}


@dataclass(frozen=True, slots=True)
class Cell:
    kind: Kind
    damage: Damage
    replicas: int
    """How many of three are damaged, at the same place: the slaves first, then the master."""
    beside: Beside

    def __str__(self) -> str:
        return f"{self.kind.value}, {self.damage.value}, {self.replicas}, {self.beside.value}"

    def allows(self, end: End) -> bool:
        """Whether this outcome is allowed: the outcome in the table, or a better one where the outcome depends on which replica becomes
        master.
        """
        is_found_by_masters = self.kind in (Kind.CONSUME, Kind.SCHEDULE, Kind.DISPATCH) and self.damage is not Damage.CUT
        depends = is_found_by_masters or self.damage is Damage.CUT_TAIL
        return end is self.end or (end is End.WHOLE and depends and self.replicas < REPLICAS)

    @property
    def end(self) -> End:
        """The outcome that the cell must have, with each of the other faults."""
        return ENDS[self.kind, self.damage][self.replicas - 1]


REPLICAS: Final = 3
_W, _R, _P, _S, _B, _N, _T = End.WHOLE, End.REFUSED, End.PARTLY, End.SHORT, End.REBUILT, End.REPORTED, End.ELSEWHERE
ENDS: Final[dict[tuple[Kind, Damage], tuple[End, End, End]]] = {
    (Kind.MESSAGES, Damage.FLIP): (_W, _W, _P),
    (Kind.MESSAGES, Damage.CUT): (_R, _R, _R),
    (Kind.MESSAGES, Damage.CUT_TAIL): (_W, _S, _S),
    (Kind.MESSAGES, Damage.LOST_PAGES): (_W, _W, _S),
    (Kind.MESSAGES, Damage.UNREADABLE): (_W, _W, _P),
    (Kind.ACTIONS, Damage.FLIP): (_W, _W, _N),
    (Kind.ACTIONS, Damage.CUT): (_R, _R, _R),
    (Kind.ACTIONS, Damage.CUT_TAIL): (_W, _S, _S),
    (Kind.ACTIONS, Damage.LOST_PAGES): (_W, _W, _S),
    (Kind.ACTIONS, Damage.UNREADABLE): (_W, _W, _N),
    (Kind.CONSUME, Damage.FLIP): (_B, _B, _B),
    (Kind.CONSUME, Damage.CUT): (_W, _W, _W),
    (Kind.CONSUME, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.CONSUME, Damage.UNREADABLE): (_B, _B, _B),
    (Kind.CHECKPOINT, Damage.FLIP): (_W, _W, _W),
    (Kind.CHECKPOINT, Damage.CUT): (_W, _W, _W),
    (Kind.CHECKPOINT, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.CHECKPOINT, Damage.UNREADABLE): (_W, _W, _W),
    (Kind.SCHEDULE, Damage.FLIP): (_T, _T, _P),
    (Kind.SCHEDULE, Damage.CUT): (_R, _R, _R),
    (Kind.SCHEDULE, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.SCHEDULE, Damage.UNREADABLE): (_R, _R, _R),
    (Kind.DISPATCH, Damage.FLIP): (_R, _R, _R),
    (Kind.DISPATCH, Damage.CUT): (_R, _R, _R),
    (Kind.DISPATCH, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.DISPATCH, Damage.UNREADABLE): (_R, _R, _R),
    (Kind.IDENTITY, Damage.FLIP): (_R, _R, _R),
    (Kind.IDENTITY, Damage.CUT): (_R, _R, _R),
    (Kind.IDENTITY, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.IDENTITY, Damage.UNREADABLE): (_R, _R, _R),
    (Kind.MARK, Damage.FLIP): (_W, _W, _W),
    (Kind.MARK, Damage.CUT): (_W, _W, _W),
    (Kind.MARK, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.MARK, Damage.UNREADABLE): (_W, _W, _W),
}


def cells() -> Iterator[Cell]:
    """Every cell of the replicas' own files."""
    for (kind, damage), replicas, beside in product(ENDS, (1, 2, 3), Beside):
        yield Cell(kind, damage, replicas, beside)
