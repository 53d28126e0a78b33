"""Chooses the next message so that each key's messages are worked on in order, and different keys at the same time. Pure.

A key has a queue of messages, and at most one message *in work*: the next one waits until that one is `finished`. Keys take turns: after
each message a key goes behind all other ready keys, so that a key with many messages does not delay others.

One `KeyQueue` serves all lanes of a consumer. A lane may be lost while a handler works on one of its messages, and be assigned again, or
its keys may return in another lane after a route change: then no second handler may start for the same key.

A lane can be *held*: its messages keep their places and are not handed out until it is released. `drop` forgets its waiting messages; a
message in work stays in work until it is finished.

Worked example: lines a: 1, 3 and b: 2. next gives 1 (of a), then 2 (of b), then nothing. finished(b), finished(a): next gives 3.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Generic, TypeVar

L = TypeVar("L")
M = TypeVar("M")


class KeyQueue(Generic[L, M]):
    """`L` is the type of a lane (hashable), `M` of a message."""

    def __init__(self) -> None:
        self._ready: OrderedDict[bytes, tuple[L, M]] = OrderedDict()
        """Keys whose next message can be handed out, in their turn, with the first message of each; its lane may be held."""
        self._in_work: set[bytes] = set()
        self._lines: dict[bytes, deque[tuple[L, M]]] = {}
        """What waits behind a key's first message, or behind the one in work. Most keys have nothing there."""
        self.held: dict[L, OrderedDict[bytes, tuple[L, M]]] = {}
        """Held lanes, with the keys that are ready except for the hold."""

    def put(self, lane: L, key: bytes, message: M) -> None:
        """Add a message behind all others of its key."""
        self.extend(lane, ((key, message),))

    def extend(self, lane: L, messages: Iterable[tuple[bytes, M]]) -> None:
        """Messages with their keys, each behind all others of its key."""
        ready, in_work, lines, held = self._ready, self._in_work, self._lines, self.held
        for key, message in messages:
            if key not in ready and key not in in_work and not (held and self._is_stopped(key)):
                ready[key] = lane, message
            elif key in lines:
                lines[key].append((lane, message))
            else:
                lines[key] = deque(((lane, message),))

    def _is_stopped(self, key: bytes) -> bool:
        return any(key in stopped for stopped in self.held.values())

    def next(self) -> tuple[bytes, M] | None:
        """The next message and its key, which is in work from now on; None if there is none."""
        ready, held = self._ready, self.held
        while ready:
            key, first = ready.popitem(last=False)
            lane, message = first
            if held and lane in held:
                held[lane][key] = first
                continue
            self._in_work.add(key)
            return key, message
        return None

    def finished(self, key: bytes) -> None:
        """The key's message in work is finished: its next one may be handed out. The key must be in work."""
        self._in_work.remove(key)
        line = self._lines.get(key)
        if line is not None:
            self._ready[key] = line.popleft()
            if not line:
                del self._lines[key]

    def hold(self, lane: L) -> None:
        """Hand out none of the lane's messages for now."""
        self.held.setdefault(lane, OrderedDict())

    def release(self, lane: L) -> None:
        """End the hold."""
        self._ready.update(self.held.pop(lane, {}))

    def drop(self, lane: L) -> None:
        """Forget the lane's messages and its hold."""
        self.release(lane)
        firsts = [self._ready, *self.held.values()]
        keys = dict.fromkeys(key for each in firsts for key, first in each.items() if first[0] == lane)
        keys |= dict.fromkeys(key for key, line in self._lines.items() if any(each == lane for each, _ in line))
        for key in keys:
            waiting = [*[each.pop(key) for each in firsts if key in each], *self._lines.pop(key, ())]
            rest = deque(each for each in waiting if each[0] != lane)
            if rest and key not in self._in_work:
                self._ready[key] = rest.popleft()
            if rest:
                self._lines[key] = rest

    @property
    def waiting(self) -> int:
        """The number of messages that are not in work."""
        return sum(map(len, (self._ready, *self.held.values(), *self._lines.values())))

    def check(self) -> None:
        """The whole invariant, for tests."""
        stopped = [key for held in self.held.values() for key in held]
        can_go_on = {*self._ready, *stopped}
        assert all(self._lines.values())
        assert len(stopped) == len(set(stopped))
        assert not set(stopped) & set(self._ready)
        assert not can_go_on & self._in_work
        assert set(self._lines) <= can_go_on | self._in_work
        assert all(first[0] == lane for lane, held in self.held.items() for first in held.values())
