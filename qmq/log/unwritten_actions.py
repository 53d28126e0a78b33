"""The actions that are applied and not written yet. On a full disk they wait here, each encoded once, until there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from qmq.limits import BATCH_BYTES_MAX, KIB
from qmq.log.actions import AnyAction, ScheduleAction, encode_actions

ENTRY_BYTES_MAX: Final = BATCH_BYTES_MAX - 64 * KIB
"""The actions of one turn are one entry, unless they are longer than this. No single action is."""
_WRITE_BYTES: Final = 8 * 1024 * KIB


class ActionEntry(NamedTuple):
    """The payload of an entry with `actions` actions, and those of a schedule among them."""

    payload: bytes
    actions: int
    scheduled: tuple[ScheduleAction, ...]


class UnwrittenActions:
    """`add` what is applied; then, to write it, take entries with `entries`, and report them with `written`."""

    __slots__ = ("_encoded", "_fresh", "_has_scheduled", "encoded_bytes", "waits")

    def __init__(self) -> None:
        self._fresh: list[AnyAction] = []
        self._has_scheduled = False
        self._encoded: deque[ActionEntry] = deque()
        self.encoded_bytes = 0
        """The bytes that wait since an earlier attempt to write them."""
        self.waits = False
        """True while there are actions to write. An attribute, because each turn of a broker looks at it several times."""

    def add(self, action: AnyAction, *, is_scheduled: bool) -> None:
        self._fresh.append(action)
        self.waits = True
        if is_scheduled:
            self._has_scheduled = True

    def entries(self) -> list[ActionEntry]:
        """The oldest entries, as many as one write takes."""
        if self._fresh:
            for entry in _cut(self._fresh, has_scheduled=self._has_scheduled):
                self._encoded.append(entry)
                self.encoded_bytes += len(entry.payload)
            self._fresh = []
        found: list[ActionEntry] = []
        size = 0
        for entry in self._encoded:
            size += len(entry.payload)
            if found and size > _WRITE_BYTES:
                break
            found.append(entry)
        return found

    def written(self, count: int) -> None:
        """The oldest `count` entries are in the log."""
        for _ in range(count):
            self.encoded_bytes -= len(self._encoded.popleft().payload)
        self.waits = bool(self._fresh or self._encoded)


def _cut(actions: list[AnyAction], *, has_scheduled: bool) -> Iterator[ActionEntry]:
    payload = encode_actions(actions)
    if len(payload) <= ENTRY_BYTES_MAX or len(actions) == 1:
        yield ActionEntry(
            payload, len(actions), tuple([each for each in actions if isinstance(each, ScheduleAction)]) if has_scheduled else ()
        )
        return
    half = len(actions) // 2
    yield from _cut(actions[:half], has_scheduled=has_scheduled)
    yield from _cut(actions[half:], has_scheduled=has_scheduled)
