"""The balancer: which broker group takes the next batch of an unordered subject. Pure.

Rules:
* Groups take turns, in the order in which they became known. The turn is *sticky*: a group gets
  batches until `stay_bytes` are sent (a small batch counts as `BATCH_COST_BYTES`: about 30 lone
  messages), then the next group gets them. Switching for each batch would halve the batches of a
  producer of lone messages; never switching would load one group. With `stay_bytes` 0 each batch
  goes to the next group.
* A group without room (back-pressure, a pause, no connection) is skipped immediately, so a slow
  group gets what it can take.
* A group that is stalled (it does not answer) is used only if there is no other, and keeps the turn
  for one batch only.
* A group that is drained, or that no longer has the subject, gets nothing new; it stays known,
  since lookups of batches that it may have go there. While no group is writable, batches wait, and
  the caller asks a metaserver for others.

The producer and the delay server use it. Spark's sink does not (`BalancedRows`): several attempts
of one task may run at once and must agree without asking, so not turns but the number of the
batch's first row decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Generic, Protocol, TypeVar

from qmq import limits

BATCH_COST_BYTES: Final = 64 * limits.KIB


class GroupWindow(Protocol):
    """The batches in flight to one broker group."""

    is_writable: bool
    """Whether the group takes new messages; set by the balancer."""

    @property
    def is_stalled(self) -> bool: ...


G = TypeVar("G", bound=GroupWindow)


class Balancer(Generic[G]):
    """`make` makes the destination of a broker group at its first use. `has_room` says whether a
    batch of so many bytes can be sent there now. `first` returns the index, below a number, after
    which turns begin. `turned` is called at each search for the next group, with the group that
    gets the turn, if any, and those that were skipped.
    """

    def __init__(
        self,
        make: Callable[[str], G],
        has_room: Callable[[G, int], bool],
        *,
        stay_bytes: int = 0,
        first: Callable[[int], int] = lambda count: 0,
        turned: Callable[[G | None, list[G]], None] = lambda chosen, passed: None,
    ) -> None:
        self._make = make
        self._has_room = has_room
        self._stay_bytes = stay_bytes
        self._first = first
        self._turned = turned
        self._groups: dict[str, G] = {}
        self._turns: list[G] = []
        self._at = 0
        self._current: G | None = None
        self._stay = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[G]:
        return iter(self._turns)

    @property
    def current(self) -> G | None:
        """The group that has the turn; None before the first."""
        return self._current

    @property
    def is_writable(self) -> bool:
        """Whether any group takes new messages."""
        return any([group.is_writable for group in self._turns])  # noqa: C419 - faster than a generator

    def learn(self, groups: Mapping[str, bool]) -> None:
        """The subject's broker groups, and whether each is writable."""
        for name, group in self._groups.items():
            group.is_writable = groups.get(name, False)
        for name, is_writable in groups.items():
            if name not in self._groups:
                group = self._groups[name] = self._make(name)
                group.is_writable = is_writable
                self._turns.append(group)
        if self._current is None and self._turns:
            self._at = self._first(len(self._turns))

    def pick(self, size: int) -> G | None:
        """The group for the next batch, of `size` bytes; None if no group has room. Call `charge`
        afterwards if the batch is sent.
        """
        group = self._current
        if (
            group is not None
            and self._stay > 0
            and group.is_writable
            and not group.is_stalled
            and self._has_room(group, size)
        ):
            return group
        return self._turn(size)

    def _turn(self, size: int) -> G | None:
        turns, count = self._turns, len(self._turns)
        stalled: G | None = None
        chosen: G | None = None
        passed: list[G] = []
        for step in range(1, count + 1):
            at = (self._at + step) % count
            group = turns[at]
            if not group.is_writable:
                continue
            if not self._has_room(group, size):
                passed.append(group)
            elif not group.is_stalled:
                self._at, self._current, self._stay = at, group, self._stay_bytes
                chosen = group
                break
            else:
                stalled = stalled or group
        self._turned(chosen, passed)
        return chosen or stalled

    def charge(self, size: int) -> None:
        """A batch of `size` bytes was given to the group that `pick` named."""
        self._stay -= size + BATCH_COST_BYTES
