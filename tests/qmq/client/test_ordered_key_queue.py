"""Order for each key, and no key kept waiting: the queue against lists."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.forms import examples

from qmq.client.consuming.ordered.keys import KeyQueue


def filled(*messages: tuple[str, bytes, int]) -> KeyQueue[str, int]:
    queue: KeyQueue[str, int] = KeyQueue()
    for lane, key, message in messages:
        queue.extend(lane, [(key, message)])
    return queue


LANES = st.sampled_from(["x", "y", "z"])
KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])


class KeyMachine(RuleBasedStateMachine):
    """The model is one list of (lane, key, message) in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: KeyQueue[str, int] = KeyQueue()
        self.lines: list[tuple[str, bytes, int]] = []
        self.working: set[bytes] = set()
        self.held: set[str] = set()
        self.count = 0

    @rule(lane=LANES, key=KEYS)
    def put(self, lane: str, key: bytes) -> None:
        self.count += 1
        self.queue.extend(lane, [(key, self.count)])
        self.lines.append((lane, key, self.count))

    def firsts(self) -> dict[bytes, tuple[str, int]]:
        """For every key without a message in work its first message, unless the key's lane is
        held.
        """
        found: dict[bytes, tuple[str, int]] = {}
        for lane, key, message in self.lines:
            found.setdefault(key, (lane, message))
        return {
            key: each
            for key, each in found.items()
            if key not in self.working and each[0] not in self.held
        }

    @rule()
    def next(self) -> None:
        firsts = self.firsts()
        found = self.queue.next()
        if found is None:
            assert not firsts
            return
        key, message = found
        assert firsts[key][1] == message
        self.lines.remove((firsts[key][0], key, message))
        self.working.add(key)

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.working)))
        self.queue.finished(key)
        self.working.remove(key)

    @rule(lane=LANES)
    def hold(self, lane: str) -> None:
        self.queue.pause(lane)
        self.held.add(lane)

    @rule(lane=LANES)
    def release(self, lane: str) -> None:
        self.queue.resume(lane)
        self.held.discard(lane)

    @rule(lane=LANES)
    def drop(self, lane: str) -> None:
        self.queue.drop(lane)
        self.held.discard(lane)
        self.lines = [each for each in self.lines if each[0] != lane]

    @invariant()
    def is_sound(self) -> None:
        self.queue.check()
        assert self.queue.waiting == len(self.lines)


KeyMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=60, deadline=None
)
TestKeyMachine = KeyMachine.TestCase


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=200),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(200), deadline=None)
def test_the_key_that_could_continue_for_the_longest_is_next(
    stream: list[int], workers: int, random: Random
) -> None:
    """So a key waits for at most one turn of each other key."""
    queue = filled(*[("l", bytes([key]), place) for place, key in enumerate(stream)])
    left = Counter(bytes([key]) for key in stream)
    can_continue = list(dict.fromkeys(bytes([key]) for key in stream))
    in_work: list[bytes] = []
    while can_continue or in_work:
        while len(in_work) < workers and (found := queue.next()) is not None:
            assert found[0] == can_continue.pop(0)
            in_work.append(found[0])
        over = in_work.pop(random.randrange(len(in_work)))
        queue.finished(over)
        left[over] -= 1
        can_continue += [over] if left[over] else []
    assert queue.waiting == 0
