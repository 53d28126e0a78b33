"""Masters, as metaservers describe them: one an epoch, and no commit that is taken back.

    {"process":"w","type":"invoke","f":"look","t_ns":10}
    {"process":"w","type":"ok","f":"look","t_ns":20,"states":[["g1","g1-a",3,71,true],["g1","g1-b",3,70,false]]}

A state is (broker group, replica, the epoch that it promised, the index that it knows to be
committed, whether it serves as master). A look takes a while, and asks each replica at some moment
of it: two that serve in one look may have served one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from history.events import Anomaly, Operation, Reset, learn

from campaign.values import Checker, Evidence

TOO_LONG_NS: Final = 2_000_000_000
"""A master that no majority answers stops within two seconds, and its successor needs more than one
to begin.
"""


class ReplicaSeen(NamedTuple):
    """What a replica said of itself."""

    group: str
    replica: str
    epoch: int
    commit: int
    is_serving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterLook(Operation):
    """All replicas that answered a metaserver."""

    f: ClassVar[str] = "look"
    states: tuple[ReplicaSeen, ...] = ()


learn(MasterLook, states=lambda found: tuple(ReplicaSeen(*each) for each in found))


def _two_of_an_epoch(looks: list[MasterLook]) -> Iterator[Anomaly]:
    found: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for look in looks:
        for each in look.states:
            if each.is_serving:
                found[each.group, each.epoch].add(each.replica)
    for (group, epoch), names in found.items():
        if len(names) > 1:
            yield Anomaly(
                "one_master", f"{' and '.join(sorted(names))} served {group} in epoch {epoch}"
            )


def _two_at_a_time(evidence: Evidence) -> Iterator[Anomaly]:
    """Looks without an answer end a stretch, since nothing is known then."""
    since_ns: dict[tuple[str, tuple[str, ...]], int] = {}
    told: set[tuple[str, tuple[str, ...]]] = set()
    begun_ns = 0
    for event in evidence.history:
        if not isinstance(event, MasterLook):
            continue
        if event.type == "invoke":
            begun_ns = event.t_ns
            continue
        serving: defaultdict[str, list[str]] = defaultdict(list)
        for each in event.states:
            if each.is_serving:
                serving[each.group].append(each.replica)
        pairs = {
            (group, tuple(sorted(names))) for group, names in serving.items() if len(names) > 1
        }
        since_ns = {pair: since_ns.get(pair, event.t_ns) for pair in pairs}
        for pair in pairs - told:
            lasted_ns = begun_ns - since_ns[pair]
            if lasted_ns > TOO_LONG_NS:
                told.add(pair)
                group, names = pair
                yield Anomaly(
                    "one_master",
                    f"{' and '.join(names)} served {group} at one time for "
                    f"{lasted_ns / 1e9:.1f} s and more",
                )


def _one_master(evidence: Evidence) -> Iterator[Anomaly]:
    """Finds the planted bug never-step-down."""
    events: Sequence[Operation] = evidence.history
    looks = [each for each in events if isinstance(each, MasterLook) and each.type == "ok"]
    yield from _two_of_an_epoch(looks)
    yield from _two_at_a_time(evidence)


def _taken_back(evidence: Evidence) -> Iterator[Anomaly]:
    """A master of the same or a later epoch serves with everything that was ever known to be
    committed: what one look showed, the next look confirms. Around a power cut that may destroy the
    last entries nothing is known.

    Finds the planted bug cut-at-election.
    """
    best: dict[str, ReplicaSeen] = {}
    for event in evidence.history:
        if isinstance(event, Reset):
            best.clear()
        if not isinstance(event, MasterLook) or event.type != "ok":
            continue
        for each in event.states:
            known = best.get(each.group)
            if (
                known is not None
                and each.is_serving
                and each.epoch >= known.epoch
                and each.commit < known.commit
            ):
                yield Anomaly(
                    "commit_stays",
                    f"{each.replica} serves {each.group} in epoch {each.epoch} with "
                    f"{each.commit} committed entries; {known.replica} knew of {known.commit} "
                    f"in epoch {known.epoch}",
                )
        for each in event.states:
            known = best.get(each.group)
            if known is None or each.commit > known.commit:
                best[each.group] = each


CHECKERS = (
    Checker(
        name="one_master",
        what="an epoch has one master, and one that hears no majority stops serving",
        find=_one_master,
    ),
    Checker(
        name="commit_stays",
        what="what is committed is committed under every later master",
        find=_taken_back,
    ),
)
