"""Chooses the broker groups of a new subject. Pure.

    read-write groups only; those with a master first, then those with the fewest subjects, then by name;
    shards of one broker, which share its machines (docs/SHARDS.md), only when there are no other groups of that kind left

A group without a master, perhaps during an election, is chosen when there are not enough others. The choice stays when groups are added
later (`qmq subject place` changes it).

Example: g1 has 3 subjects, g2 has 1, g3 has 1 and is drained, g4 is new. Two groups for a new subject: g4, g2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from qmq.errors import InvalidArgument, NotConnected, ReadOnly
from qmq.model import SubjectConfig
from qmq.shard_names import family_of

GROUPS_PER_SUBJECT: Final = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A broker group that can be chosen."""

    name: str
    is_writable: bool
    has_master: bool
    subjects: int


def choose(candidates: Iterable[Candidate], count: int = GROUPS_PER_SUBJECT) -> tuple[str, ...]:
    """Choose `count` groups for a new subject, or fewer if there are not enough. Raises NotConnected without groups, ReadOnly if all are
    drained.
    """
    known = list(candidates)
    writable = [each for each in known if each.is_writable]
    if not known:
        raise NotConnected("no broker is registered: is one running, and can it reach the coordination store?")
    if not writable:
        raise ReadOnly(f"all broker groups are drained ({', '.join(each.name for each in known)}): `qmq broker resume` one of them")
    ranked = sorted(writable, key=lambda each: (not each.has_master, each.subjects, each.name))
    seen: Counter[tuple[bool, str]] = Counter()
    rounds: list[tuple[bool, int, int, str]] = []
    for rank, each in enumerate(ranked):
        family = each.has_master, family_of(each.name)
        rounds.append((not each.has_master, seen[family], rank, each.name))
        seen[family] += 1
    return tuple(name for *_, name in sorted(rounds)[:count])


def move(config: SubjectConfig, groups: tuple[str, ...], known: Iterable[str]) -> SubjectConfig:
    """Move the subject to other groups. The record keeps the former groups, because they may still hold messages, and the metaserver cannot
    know when they have none. Raises InvalidArgument for no group, a group named twice, or one that is not `known`.
    """
    names = set(known)
    strangers = [group for group in groups if group not in names]
    if strangers:
        raise InvalidArgument(f"there is no broker group {', '.join(strangers)}: there are {', '.join(sorted(names)) or 'none'}")
    if not groups or len(set(groups)) < len(groups):
        raise InvalidArgument(f"a subject lives on one broker group at least, and on each once, not on {list(groups)}")
    hosts = hosts_of(config, sorted(names))
    former = tuple(group for group in hosts if group not in groups)
    return replace(config, groups=groups, former_groups=former)


def hosts_of(config: SubjectConfig, known: Iterable[str]) -> tuple[str, ...]:
    """All groups that may hold messages of the subject."""
    return (*(config.groups or known), *config.former_groups)
