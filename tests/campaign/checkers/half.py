"""Half messages: a transaction's message waits for its decision.

    {"process":"p","type":"ok","f":"later","values":[7],"due_ms":[20000]}      stored; without a decision it is cancelled then
    {"process":"p","type":"invoke","f":"commit","value":7}
    {"process":"p","type":"ok","f":"commit","value":7}                         will be delivered
    {"process":"p","type":"fail","f":"commit","value":7}                       too late, or decided otherwise
    {"process":"k","type":"ok","f":"cancel","value":7}                         rolled back, for certain

beside `later`, `cancel` (a rollback) and `arrive` (checkers/delayed.py). Two processes may decide
one message: its sender, and who checks back on messages that nobody decided. The planted bug
deliver-undecided breaks `half_waits`.
"""  # noqa: E501

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from history.events import Anomaly, Operation, learn

from campaign.checkers.delayed import Arrive, Cancel, Later
from campaign.values import Checker, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfCommit(Operation):
    """A half message is to be delivered."""

    f: ClassVar[str] = "commit"
    value: int


learn(HalfCommit)


@dataclass(slots=True)
class _Half:
    end: str = "info"
    commits: set[tuple[str, str]] = field(default_factory=set)
    """Who tried to commit it, and how that ended; `invoke` for one without an end."""
    rollbacks: set[tuple[str, str]] = field(default_factory=set)
    arrivals: list[Arrive] = field(default_factory=list)

    @property
    def is_committed(self) -> bool:
        """For certain, and not rolled back afterwards."""
        return "ok" in _ends(self.commits) and not _ends(self.rollbacks) - {"fail"}


def _ends(decisions: set[tuple[str, str]]) -> set[str]:
    return {end for _, end in decisions}


def _halves(events: Iterable[Operation]) -> dict[int, _Half]:
    found: defaultdict[int, _Half] = defaultdict(_Half)
    for event in events:
        if isinstance(event, Later):
            for value in event.values:
                if event.type != "invoke":
                    found[value].end = event.type
        elif isinstance(event, HalfCommit | Cancel):
            half = found[event.value]
            decisions = half.commits if isinstance(event, HalfCommit) else half.rollbacks
            decisions.add((event.process, event.type))
            if event.type != "invoke":
                decisions.discard((event.process, "invoke"))
        elif isinstance(event, Arrive):
            found[event.value].arrivals.append(event)
    return found


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> dict[int, _Half]:
    return _halves(evidence.history)


def all_decided_arrived(events: Sequence[Operation]) -> bool:
    """Whether all that was committed for certain has come."""
    return not any(each.is_committed and not each.arrivals for each in _halves(events).values())


def _lost(evidence: Evidence) -> Iterator[Anomaly]:
    for value, half in _of(evidence).items():
        if half.is_committed and not half.arrivals:
            yield Anomaly("committed_comes", f"{value} was committed, and never came")


def _undecided(evidence: Evidence) -> Iterator[Anomaly]:
    for value, half in _of(evidence).items():
        if half.arrivals and not _ends(half.commits) - {"fail"}:
            yield Anomaly(
                "half_waits",
                f"{value} came, and nobody committed it (tried: {sorted(half.commits)})",
            )


CHECKERS = (
    Checker(
        name="committed_comes",
        what="a committed half message is delivered, unless it was cancelled after that",
        find=_lost,
    ),
    Checker(
        name="half_waits",
        what="a half message without a commit is never delivered",
        find=_undecided,
    ),
)
