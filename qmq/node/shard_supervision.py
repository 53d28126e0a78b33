"""Decides what the supervisor of shards does at each event of a shard. Pure; docs/SHARDS.md has the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

PAUSES_MS: Final = (500, 1_000, 2_000, 5_000, 10_000)
STEADY_MS: Final = 60_000
"""After serving for this long, a shard that ends restarts with the shortest pause."""


class ShardState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    RESTING = "resting"
    ENDED = "ended"


@dataclass(slots=True)
class _Shard:
    state: ShardState = ShardState.STARTING
    has_served: bool = False
    serving_since_ms: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the shard again after `after_ms`."""

    shard: int
    after_ms: int


@dataclass(frozen=True, slots=True)
class StopAll:
    """Tell all running shards to stop."""


@dataclass(slots=True)
class ShardSupervision:
    """The state of the shards 1 to `count`, which are all starting at first. Times are milliseconds of a monotonic clock."""

    count: int
    pauses_ms: Sequence[int] = PAUSES_MS
    is_stopping: bool = False
    exit_status: int = 0
    """The supervisor's exit status: that of the first shard that failed for good, or did not stop cleanly."""
    _shards: dict[int, _Shard] = field(init=False)

    def __post_init__(self) -> None:
        self._shards = {number: _Shard() for number in range(1, self.count + 1)}

    def state(self, shard: int) -> ShardState:
        return self._shards[shard].state

    @property
    def are_all_serving(self) -> bool:
        return all(each.state is ShardState.SERVING for each in self._shards.values())

    @property
    def is_over(self) -> bool:
        """True if all shards have ended."""
        return all(each.state is ShardState.ENDED for each in self._shards.values())

    def started(self, shard: int) -> bool:
        """Note that the shard's pause has ended. Returns False if the shard must not start any more."""
        found = self._shards[shard]
        found.state = ShardState.ENDED if self.is_stopping else ShardState.STARTING
        return not self.is_stopping

    def ready(self, shard: int, now_ms: int) -> None:
        """Note that the shard serves."""
        found = self._shards[shard]
        found.state, found.has_served, found.serving_since_ms = ShardState.SERVING, True, now_ms

    def ended(self, shard: int, status: int, now_ms: int) -> Restart | StopAll | None:
        """Note that the shard's process ended with an exit status (negative: killed by that signal)."""
        found = self._shards[shard]
        was_steady = found.state is ShardState.SERVING and now_ms - found.serving_since_ms >= STEADY_MS
        if self.is_stopping or not found.has_served:
            found.state = ShardState.ENDED
            self.exit_status = self.exit_status or (status if status > 0 else 128 - status if status < 0 else 0)
            if self.is_stopping:
                return None
            self.exit_status = self.exit_status or 1  # a broker that ends without a request has failed, with any exit status
            return self.stop()
        found.state = ShardState.RESTING
        found.restarts = 1 if was_steady else found.restarts + 1
        return Restart(shard, self.pauses_ms[min(found.restarts, len(self.pauses_ms)) - 1])

    def stop(self) -> StopAll:
        """Stop all shards. Those in a pause do not start again."""
        self.is_stopping = True
        for each in self._shards.values():
            if each.state is ShardState.RESTING:
                each.state = ShardState.ENDED
        return StopAll()
