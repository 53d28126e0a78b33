"""A small world walked through completely: three replicas, every order in which messages arrive or
get lost, to some depth.

Two candidates have won epochs one after the other; from there each step delivers (or drops, or
doubles) one message that is on its way. After every step the properties must hold: one master an
epoch, no committed entry is ever replaced.
"""

from __future__ import annotations

import copy

import pytest
from qmq_replication.ready import Message
from replication_world import Group

DEPTH = 6


class Walk:
    """Depth first, and no state twice."""

    def __init__(self) -> None:
        self.seen: set[object] = set()
        self.states = 0
        self.masters = 0

    def go(
        self, group: Group, committed: dict[int, int], masters: dict[int, str], depth: int
    ) -> None:
        """Check, then try everything that may happen next."""
        committed, masters = dict(committed), dict(masters)
        self._check(group, committed, masters)
        key = self._key(group, depth)
        if depth == 0 or key in self.seen:
            return
        self.seen.add(key)
        for number in range(len(group.queue)):
            self.go(self._after(group, number, keeps=False), committed, masters, depth - 1)
        if group.queue:
            self.go(self._after(group, 0, keeps=True), committed, masters, depth - 1)

    def _after(self, group: Group, number: int, *, keeps: bool) -> Group:
        other = copy.deepcopy(group)
        sender, to, message = other.queue[number]
        if not keeps:
            del other.queue[number]
        other.core[to].step(other.now_ms, sender, message)
        other.carry_out(to)
        other.requests.clear()
        return other

    def _key(self, group: Group, depth: int) -> object:
        cores = tuple(
            (
                core.state.promised,
                core.state.role,
                core.state.commit,
                core.in_step,
                tuple(group.log[name].epochs),
            )
            for name, core in group.core.items()
        )
        return depth, cores, tuple(sorted(map(repr, group.queue)))

    def _check(self, group: Group, committed: dict[int, int], masters: dict[int, str]) -> None:
        self.states += 1
        for name, core in group.core.items():
            if core.leader is not None:
                assert masters.setdefault(core.leader.epoch, name) == name
                self.masters += 1
            for index in range(1, core.state.commit + 1):
                epoch = core.state.history.epoch_at(index)
                assert epoch is not None
                assert committed.setdefault(index, epoch) == epoch, (
                    f"{index} was committed with another epoch"
                )


@pytest.mark.sampled
def test_every_order_of_messages_between_two_candidates() -> None:
    group = Group(logs={"a": (1, 2), "b": (1,), "c": (1,)}, epoch=2)
    group.campaign("a")
    group.campaign("b")
    walk = Walk()
    walk.go(group, {}, {}, DEPTH)
    assert walk.states > 2_000
    assert walk.masters


@pytest.mark.sampled
def test_every_order_of_messages_while_a_master_brings_two_slaves_in_step() -> None:
    group = Group(logs={"a": (1, 2, 2), "b": (1, 1), "c": (1,)}, epoch=2, read_max=1)
    group.campaign("a")
    asked: list[tuple[str, str, Message]] = group.queue
    group.queue = [each for each in asked if each[1] == "b"]
    group.deliver()
    group.deliver()
    group.pass_time(group.timing.heartbeat_ms, "a")
    walk = Walk()
    walk.go(group, {}, {}, DEPTH)
    assert walk.states > 500
    assert walk.masters
