"""Order for each key, and as much at once as there are keys: which message may be worked on next. Pure.

A key has a line of messages, first come first out, and at most one message *in work*: the next one of its line waits until that one is
`finished`. Keys take turns, so a key with many messages does not keep others waiting: after each message it goes behind all that can go on.

One queue serves all lanes of a consumer, not one for each lane. A lane may be lost while a handler still has a message of it, and come
back, or its keys may come back in another lane after a change of the route: a handler for the same key must not start beside the old one
then, whatever became of the lane that its message came from.

A lane can be *held*: its messages keep their places and are not given out until it is released. `drop` forgets its messages; what is in
work stays in work until it is finished, as for any other lane.

Worked example: lines a: 1, 3 and b: 2. next gives 1 (of a), then 2 (of b), then nothing. finished(b), finished(a): next gives 3.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

L = TypeVar("L")
M = TypeVar("M")


class KeyQueue(Generic[L, M]):
    """`L` is a lane, which can be hashed, `M` a message."""

    def __init__(self) -> None:
        self._lines: dict[bytes, deque[tuple[L, M]]] = {}
        self._in_work: set[bytes] = set()
        self._ready: OrderedDict[bytes, None] = OrderedDict()
        """Keys that can go on, in their turn; perhaps with a lane that is held in front."""
        self._held: dict[L, OrderedDict[bytes, None]] = {}
        """Held lanes, with keys that could go on but for them."""

    def put(self, lane: L, key: bytes, message: M) -> None:
        """A message, behind all others of its key."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = deque()
            if key not in self._in_work:
                self._ready[key] = None
        line.append((lane, message))

    def next(self) -> tuple[bytes, M] | None:
        """A message whose key has nothing in work, and its key, which is in work now; None if there is none."""
        while self._ready:
            key, _ = self._ready.popitem(last=False)
            line = self._lines[key]
            lane, message = line[0]
            if lane in self._held:
                self._held[lane][key] = None
                continue
            line.popleft()
            if not line:
                del self._lines[key]
            self._in_work.add(key)
            return key, message
        return None

    def finished(self, key: bytes) -> None:
        """The key's message in work is over: the next one of its line may come. The key must be in work."""
        self._in_work.remove(key)
        if key in self._lines:
            self._ready[key] = None

    def hold(self, lane: L) -> None:
        """Give none of its messages out for now."""
        self._held.setdefault(lane, OrderedDict())

    @property
    def has_held(self) -> bool:
        """Whether any lane is held."""
        return bool(self._held)

    def release(self, lane: L) -> None:
        """They may come again."""
        self._ready.update(self._held.pop(lane, {}))

    def drop(self, lane: L) -> None:
        """Forget its messages, and that it was held."""
        self.release(lane)
        for key in [key for key, line in self._lines.items() if any(each == lane for each, _ in line)]:
            rest = deque(each for each in self._lines.pop(key) if each[0] != lane)
            self._ready.pop(key, None)
            for held in self._held.values():
                held.pop(key, None)
            if rest:
                self._lines[key] = rest
                if key not in self._in_work:
                    self._ready[key] = None

    @property
    def waiting(self) -> int:
        """Messages that are not in work."""
        return sum(map(len, self._lines.values()))

    def check(self) -> None:
        """The whole invariant, for tests."""
        stopped = [key for held in self._held.values() for key in held]
        can_go_on = set(self._ready) | set(stopped)
        assert all(self._lines.values())
        assert can_go_on == set(self._lines) - self._in_work
        assert len(stopped) == len(set(stopped))
        assert not set(stopped) & set(self._ready)
        assert all(self._lines[key][0][0] == lane for lane, held in self._held.items() for key in held)
