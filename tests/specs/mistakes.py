"""Mistakes for the specifications: each replaces one piece of text, and TLC has to find what it
breaks within the limits given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from specs.model_checker import ORDERING, REPLICATION, Model


@dataclass(frozen=True, slots=True)
class Mistake:
    """One piece of a specification's text and what stands there instead."""

    name: str
    breaks: str
    """The invariant."""
    steps: int
    """The length of the shortest counterexample."""
    old: str
    new: str
    limits: Mapping[str, Any] = field(default_factory=dict)

    def made_in(self, text: str) -> str:
        """The text with the mistake. Raises ValueError unless the piece occurs exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the piece is there {text.count(self.old)} times")
        return text.replace(self.old, self.new)


REPLICATION_MISTAKES: Final = (
    Mistake(
        "lead without a majority's promises",
        "LeaderCompleteness",
        16,
        "Judges(r) \\in Majorities(view[r].voters)",
        "Judges(r) # {}",
    ),
    Mistake(
        "lead though another replica is ahead",
        "LeaderCompleteness",
        20,
        "    /\\ \\A p \\in Judges(r) : ~IsAhead(promises[r][p].last, LastOf(log[r]))\n",
        "",
    ),
    Mistake(
        "accept an Append of an older epoch",
        "InStep",
        16,
        "    /\\ m.epoch >= promised[r]\n    /\\ promised' = [promised EXCEPT ![r] = m.epoch]",
        "    /\\ promised' = [promised EXCEPT ![r] = Most(@, m.epoch)]",
        {"MaxMessages": 2},
    ),
    Mistake(
        "keep promises in memory",
        "LeaderCompleteness",
        19,
        "    /\\ UNCHANGED <<store, requests, promised, log, whole, committed>>",
        (
            "    /\\ promised' = [promised EXCEPT ![r] = 0]\n    /\\ UNCHANGED <<store, "
            "requests, log, whole, committed>>"
        ),
        {"MaxKills": 1},
    ),
    Mistake(
        "let replicas in doubt judge",
        "LeaderCompleteness",
        21,
        "ELSE {p \\in found : promises[r][p].whole}",
        "ELSE found",
        {"MaxCuts": 1},
    ),
    Mistake(
        "become whole as soon as in step",
        "LeaderCompleteness",
        26,
        "    /\\ state.masterCommit > 0\n    /\\ Len(entries) >= state.masterCommit\n"
        "    /\\ EpochAt(entries, state.masterCommit) = promised'[r]",
        "    /\\ state.inStep",
        {"MaxCuts": 1},
    ),
)

FINISHED: Final = "(done[pp][k] = Len(logs[pp]) \\/ logs[pp] = <<Command>>)"

ORDERING_MISTAKES: Final = (
    Mistake(
        "accept messages after the command message",
        "SealedForEver",
        7,
        "    /\\ lease[pp]\n    /\\ ~IsSealed(pp)\n    /\\ \\E m",
        "    /\\ lease[pp]\n    /\\ \\E m",
    ),
    Mistake(
        "seal before everything accepted is in the log",
        "SealedForEver",
        7,
        "    /\\ accepted[pp] = <<>>\n    /\\ ~IsSealed(pp)",
        "    /\\ ~IsSealed(pp)",
    ),
    Mistake(
        "accept numbers with gaps",
        "StoredInOrder",
        9,
        "IF new = <<>> THEN {} ELSE {Head(new)}",
        "Elements(new)",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "send before the outcome of earlier messages is known",
        "StoredInOrder",
        16,
        "    /\\ \\A other \\in Partitions \\ {pp} : OfKey(outstanding[other], k) = <<>>\n",
        "",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "open partitions that the group has not come to",
        "Order",
        22,
        "v \\in 1..frontier[k]}\n    /\\ lanes",
        "v \\in 1..Latest}\n    /\\ lanes",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "leave a sealed partition before its end",
        "NothingSkipped",
        10,
        f"IsSealed(pp) /\\ {FINISHED}",
        "IsSealed(pp)",
    ),
    Mistake(
        "take missing progress for done",
        "NothingSkipped",
        10,
        f"IsSealed(pp) /\\ {FINISHED}",
        "IsSealed(pp) /\\ done[pp][k] \\in {0, Len(logs[pp])}",
    ),
    Mistake(
        "leave a fenced partition before its command message",
        "NothingSkipped",
        12,
        "IsFinished(pp, k) == IsSealed(pp) /\\ ",
        "IsFinished(pp, k) == (IsSealed(pp) \\/ pp \\in fences) /\\ ",
        {"MaxFences": 1, "Keys": "{k}"},
    ),
    Mistake(
        "send refused messages after newer ones",
        "StoredInOrder",
        16,
        "OfKey(messages, k) \\o waiting[k]]",
        "waiting[k] \\o OfKey(messages, k)]",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "forget which batches are stored",
        "StoredOnce",
        7,
        "LET stored == Elements(logs[pp]) \\union Elements(accepted[pp])",
        "LET stored == Elements(accepted[pp])",
    ),
    Mistake(
        "acknowledge before the commit",
        "NothingLost",
        5,
        "    /\\ Head(outstanding[pp]) \\in Elements(logs[pp])",
        "    /\\ Head(outstanding[pp]) \\in Elements(logs[pp]) \\union Elements(accepted[pp])",
        {"MaxFences": 1, "Keys": "{k}"},
    ),
    Mistake(
        "refuse what is stored",
        "StoredOnce",
        14,
        "    /\\ Head(outstanding[pp]) \\notin Elements(logs[pp])\n",
        "",
        {"Keys": "{k}"},
    ),
    Mistake(
        "leave a partition when any of its keys is finished",
        "NothingSkipped",
        13,
        f"IsSealed(pp) /\\ {FINISHED}",
        "IsSealed(pp) /\\ \\E other \\in Keys : done[pp][other] = Len(logs[pp])",
        {"MaxPartition": 3},
    ),
    Mistake(
        "hand out the newest message first",
        "NothingSkipped",
        10,
        "\\A other \\in positions : pos <= other",
        "\\A other \\in positions : pos >= other",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "set a message aside without those that follow",
        "Order",
        14,
        "    /\\ ~hands[c][k].aside\n",
        "",
        {"MaxMessages": 2, "MaxParked": 1, "Keys": "{k}"},
    ),
    Mistake(
        "tell a reader of no parked keys",
        "Order",
        14,
        "aside |-> parked[pp][k]]",
        "aside |-> FALSE]",
        {"MaxMessages": 2, "MaxParked": 1, "Keys": "{k}"},
    ),
    Mistake(
        "leave parked keys behind",
        "Order",
        24,
        "    /\\ parked[Reads(k)][k] => parked[routes[frontier[k] + 1][k]][k]\n",
        "",
        {"MaxMessages": 2, "MaxParked": 1, "Keys": "{k}"},
    ),
)

PLANTED: Final[tuple[tuple[Model, Mistake], ...]] = (
    *((REPLICATION, each) for each in REPLICATION_MISTAKES),
    *((ORDERING, each) for each in ORDERING_MISTAKES),
)
