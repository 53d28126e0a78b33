"""The members of a broker group, and its majorities. Pure.

*Voters* count for commit and for promises. *Learners* get all entries and do not count until they
have caught up; then the master makes them voters. A change adds or removes one voter at a time, so
that any majority before it and any majority after it share a replica (Ongaro, "Consensus: Bridging
Theory and Practice", section 4.1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from qmq.errors import InvalidArgument, NoQuorum


@dataclass(frozen=True, slots=True)
class ReplicaMembership:
    """One version of a group's membership; versions are consecutive."""

    version: int
    voters: tuple[str, ...]
    learners: tuple[str, ...] = ()

    @property
    def majority(self) -> int:
        """The number of voters in a majority."""
        return len(self.voters) // 2 + 1

    @property
    def replicas(self) -> tuple[str, ...]:
        return self.voters + self.learners

    def is_majority(self, names: Iterable[str]) -> bool:
        """True if the voters among `names` are a majority of all voters."""
        return len(set(names) & set(self.voters)) >= self.majority

    def require_majority(self, answering: Iterable[str]) -> None:
        """Raise NoQuorum if the voters that answer are no majority."""
        silent = [name for name in self.voters if name not in set(answering)]
        if len(self.voters) - len(silent) < self.majority:
            raise NoQuorum(
                f"of the voters {', '.join(self.voters)} would not answer: "
                f"{', '.join(silent)}; the group could store nothing, and no "
                f"command could undo the change. Remove {silent[0]} instead, or start it first"
            )

    def quorum_index(self, held: Mapping[str, int]) -> int:
        """The highest index that a majority holds. `held` maps each replica to its index; a missing
        replica holds nothing.
        """
        found = sorted((held.get(name, 0) for name in self.voters), reverse=True)
        return found[self.majority - 1]

    def with_learner(self, name: str) -> ReplicaMembership:
        """Next version: `name` begins to learn. Raises InvalidArgument if it is there already."""
        if name in self.replicas:
            raise InvalidArgument(f"{name!r} is already a replica of this group")
        return replace(self, version=self.version + 1, learners=(*self.learners, name))

    def with_voter(self, name: str) -> ReplicaMembership:
        """Next version: the learner becomes a voter.
        Raises InvalidArgument if it is not a learner.
        """
        if name not in self.learners:
            raise InvalidArgument(f"{name!r} is not a learner of this group")
        left = tuple(each for each in self.learners if each != name)
        return ReplicaMembership(self.version + 1, (*self.voters, name), left)

    def without(self, name: str) -> ReplicaMembership:
        """Next version: without the replica `name`. Raises InvalidArgument if `name` is not a
        replica, or is the last voter.
        """
        if name not in self.replicas:
            raise InvalidArgument(f"{name!r} is not a replica of this group")
        if self.voters == (name,):
            raise InvalidArgument(f"{name!r} is the group's last voter: add another first")
        return ReplicaMembership(
            self.version + 1,
            tuple(each for each in self.voters if each != name),
            tuple(each for each in self.learners if each != name),
        )

    def encode(self) -> bytes:
        """JSON, for the coordination store."""
        return json.dumps(
            {"version": self.version, "voters": self.voters, "learners": self.learners}
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> ReplicaMembership:
        found = json.loads(data)
        return cls(found["version"], tuple(found["voters"]), tuple(found["learners"]))
