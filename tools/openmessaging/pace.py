"""When the messages of a load are to be sent, and with which keys."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Final

RATE_MIN: Final = 1.0
KEYS: Final = 10_000


class Pace:
    """Messages at an even rate. A message that could not be sent in time is sent
    late; none is left out.
    """

    def __init__(self, rate: float, now_ns: int) -> None:
        """`rate`: messages a second, at least one."""
        self._step_ns = 1e9 / max(rate, RATE_MIN)
        self._begun_ns = now_ns
        self._count = 0

    def due(self, now_ns: int, most: int) -> list[int]:
        """The intended times of the next messages that are to be sent by now,
        at most `most`, in nanoseconds.
        """
        ready = int((now_ns - self._begun_ns) / self._step_ns) + 1
        numbers = range(self._count, max(self._count, min(ready, self._count + most)))
        self._count = numbers.stop
        return [self._begun_ns + int(number * self._step_ns) for number in numbers]


def keys_of(kind: str, source: random.Random) -> Iterator[str | None]:
    """Keys for ever: none, ten thousand in turn, or ten thousand at random. Raises ValueError for
    another kind.
    """
    known = [f"key-{number:05d}" for number in range(KEYS)]
    if kind == "NO_KEY":
        return itertools.repeat(None)
    if kind == "KEY_ROUND_ROBIN":
        return itertools.cycle(known)
    if kind == "RANDOM_NANO":
        return (source.choice(known) for _ in itertools.count())
    raise ValueError(f"keyDistributor {kind!r}: one of NO_KEY, KEY_ROUND_ROBIN, RANDOM_NANO")
