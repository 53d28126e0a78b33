"""The time by which retention counts the age of messages. It never runs ahead because one machine's
clock says so.

    time passes                         it advances by CLOCK_BOOTTIME, the machine's monotonic
                                        clock; a kept time that is ahead (qmq/broker/timekeeper.py)
                                        pulls it by at most 1000 ppm
    the kept time is behind             it becomes the kept time: what seems young is kept
    most of the group's machines agree  it becomes the kept time; while the process runs, forward by
                                        at most a day
    an operator confirms the clock      it becomes the kept time
    a restart, the same boot            it continues, as if the process had run
    a restart, another boot             it continues where it was, since only the wall clock knows
                                        how long the machine was off

*Doubt.* When the kept time leaps forward, entries stamped shortly before may be younger than they
look: a machine that was suspended stamps with the old time until its clock is put right. The stamps
are remembered with the leap's size, and their entries live longer by it:

    stamps          ...... from ------- until                  until + size ------ now
    entries of      before the leap,    in doubt                                   after it
    deleted before  x                   x - size, not below `from`                 x

So a group alone, whose clock jumps or whose machine was off, deletes nothing earlier than it would
have without that, and keeps messages longer until an operator confirms its clock. A file in the
store's folder keeps the time over restarts. It may lag behind, after a crash or on a full disk,
which is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

PULL_PPM: Final = 1000
LEAP_MS_MAX: Final = 86_400_000
"""The longest leap that machines that agree may confirm while the process runs, such as after a
suspended cluster.
"""
DOUBT_MS: Final = 3_600_000
"""How much earlier and later than a leap its replica notices entries may be stamped with the old
time: other replicas leap at other moments, and a clock may be put right some time after its machine
was suspended."""
DOUBTS_MAX: Final = 16
FILE: Final = "retention-time.json"

_NS: Final = 1_000_000


class Doubt(msgspec.Struct, frozen=True, array_like=True):
    """Entries with these stamps may be younger than they look, by `size_ms`."""

    from_ms: int
    until_ms: int
    size_ms: int


class SavedTime(msgspec.Struct, frozen=True):
    """The content of the file: `time_ms` at a moment of a machine's CLOCK_BOOTTIME."""

    boot: str
    boot_ms: int
    time_ms: int
    kept_ms: int
    """The kept time then."""
    sure_ms: int
    """The kept time when it was last known to be right."""
    doubts: Sequence[Doubt] = ()

    def ran_ms(self, boot: str, boot_ms: int) -> int:
        """How long ago it was saved; 0 if that is not known,
        because the machine was started again.
        """
        return max(boot_ms - self.boot_ms, 0) if boot and self.boot == boot else 0


class RetentionTime:
    """The table above, pure. `boot_ms` is CLOCK_BOOTTIME, `kept_ms` the kept time."""

    def __init__(self, time_ms: int, boot_ms: int) -> None:
        self._time_ns = time_ms * _NS
        self._boot_ms = boot_ms
        self._was_agreed = False
        self.doubts: list[Doubt] = []
        """The oldest first."""

    @classmethod
    def restored(
        cls, saved: SavedTime | None, boot: str, boot_ms: int, kept_ms: int, log_ms: int
    ) -> RetentionTime:
        """Continue from a saved time. Without one, from the time of the log's last entry; 0: the
        log is empty, and nothing can be lost.
        """
        time_ms = log_ms or kept_ms
        if saved is not None:
            time_ms = saved.time_ms + saved.ran_ms(boot, boot_ms)
        found = cls(min(time_ms, kept_ms), boot_ms)
        found.doubts = list(saved.doubts) if saved is not None else []
        return found

    def time_ms(self, kept_ms: int, boot_ms: int) -> int:
        """Read it."""
        elapsed_ms = max(boot_ms - self._boot_ms, 0)
        self._boot_ms += elapsed_ms
        self._time_ns += elapsed_ms * _NS
        self._time_ns += min(kept_ms * _NS - self._time_ns, elapsed_ms * PULL_PPM)
        return self._time_ns // _NS

    def before_ms(self, age_ms: int, kept_ms: int, boot_ms: int) -> int:
        """The stamp before which every entry is older than `age_ms`."""
        before_ms = self.time_ms(kept_ms, boot_ms) - age_ms
        for doubt in reversed(self.doubts):
            if doubt.from_ms < before_ms < doubt.until_ms + doubt.size_ms:
                before_ms = max(doubt.from_ms, before_ms - doubt.size_ms)
        return before_ms

    def leapt(self, sure_ms: int, until_ms: int, size_ms: int) -> None:
        """The kept time leapt forward by `size_ms` from `until_ms`. It was last known to be right
        at `sure_ms`.
        """
        self.doubts = [*self.doubts, Doubt(sure_ms - DOUBT_MS, until_ms + DOUBT_MS, size_ms)][
            -DOUBTS_MAX:
        ]

    def agree(self, kept_ms: int, boot_ms: int) -> None:
        """Most of the group's machines agree with the kept time."""
        if self._was_agreed and kept_ms - self.time_ms(kept_ms, boot_ms) > LEAP_MS_MAX:
            return
        self._was_agreed = True
        self.confirm(kept_ms, boot_ms)

    def confirm(self, kept_ms: int, boot_ms: int) -> None:
        """An operator says that the kept time is right."""
        self._boot_ms = max(boot_ms, self._boot_ms)
        self._time_ns = kept_ms * _NS
