"""Keeps the time for a server that must neither deliver nor delete early when the machine's clock
is wrong.

The *kept* time is CLOCK_BOOTTIME (which continues while the machine sleeps, and cannot be set) plus
an offset. The offset follows the wall clock, by one table:

    wall clock - kept time       the witnesses confirm       then
    under 1 s                    (not asked)                 the kept time moves to it by 500 ppm:
                                                             it never stops, never goes back
    1 s or more: a *step*        the wall clock              accepted immediately: the kept time
                                                             becomes the wall clock's
                                 the kept time               refused, as long as they confirm it
                                 neither, or no answers      accepted after 60 s, if it stayed
                                                             within 1 s and no witness denied it;
                                                             never with `accepts_alone` false, which
                                                             brokers set that have peers

After an accepted step back, the kept time goes back. If it stood still until the wall clock reached
it, all messages would be late by the error of the clock. The store's append times do not fall in
any case, and the wheel works with a time that goes back.

A *witness* is the time of another machine: a broker's, a replica's. Its time is known up to half of
the round trip. It counts for ten seconds, and in a step only if it was asked after the step was
noticed. The median of several decides; of an even number, the earlier of the middle two. If its
error allows both times, it counts for the nearer one; exactly between them, for the kept time.

When the process starts, it knows only the wall clock, which may just have jumped. Until witnesses
have answered once (the time is then *attested*), they can correct the kept time themselves: one
witness back, two witnesses forward, because late is better than early. After that, the wall clock
that they contradicted is a step like any other. A replica that begins with the time of its log
(`begin_at`) treats the wall clock as a step from the start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

STEP_MS: Final = 1000
SLEW_NS_PER_MS: Final = 500
LASTING_MS: Final = 60_000
FRESH_MS: Final = 10_000
ROUND_TRIP_MS_MAX: Final = 2000
"""An answer that took longer is too inexact."""
SETTLING_MS: Final = 3000
"""How long a process waits for witnesses after its start before it accepts its wall clock."""

REUSE_MS: Final = 20
"""How long a reading of all clocks is continued by the monotonic clock alone. The kernel tells some
of the others slowly.
"""

_NEVER: Final = (0, 0)
_NS: Final = 1_000_000
_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Testimony(NamedTuple):
    """The answer of a witness: its time minus our CLOCK_BOOTTIME, plus or minus `doubt_ms`."""

    offset_ms: int
    doubt_ms: int
    sent_boot_ms: int
    heard_boot_ms: int


@dataclass(slots=True)
class ClockStep:
    """A difference between wall clock and kept time that is not accepted (yet)."""

    size_ms: int
    noticed_boot_ms: int
    """When it was noticed."""
    since_boot_ms: int
    """Since when no witness has contradicted it."""
    is_denied: bool = False
    """Whether witnesses currently confirm the kept time."""


class Timekeeper:
    """The table above, pure. Times are milliseconds; `boot_ms` is CLOCK_BOOTTIME and does not fall
    (a lower one counts as the last one).
    """

    def __init__(self, wall_ms: int, boot_ms: int) -> None:
        self._offset_ns = (wall_ms - boot_ms) * _NS
        self._start_boot_ms = self._boot_ms = boot_ms
        self._testimonies: dict[str, Testimony] = {}
        self.step: ClockStep | None = None
        self.is_attested = False
        self.steps_accepted = 0
        self.accepts_alone = True
        self._floor_ns: int | None = None
        """The offset of a time that was kept before: the true time is not earlier."""

    @property
    def step_ms(self) -> int:
        """How far the wall clock is ahead of the kept time, if that is not accepted; else 0."""
        return self.step.size_ms if self.step is not None else 0

    @property
    def wants_witnesses(self) -> bool:
        """Whether the timekeeper has something to decide,
        so that witnesses should be asked often.
        """
        return self.step is not None or not self.is_attested

    @property
    def is_settled(self) -> bool:
        """False shortly after the start, while a wall clock that jumped before could still be
        detected: deliver nothing yet.
        """
        return self.is_attested or self._boot_ms - self._start_boot_ms >= SETTLING_MS

    def witness(self, name: str, their_time_ms: int, sent_boot_ms: int, heard_boot_ms: int) -> None:
        """`name` answered `their_time_ms`, at some moment between sending and receiving. A later
        answer replaces an earlier one.
        """
        round_trip_ms = heard_boot_ms - sent_boot_ms
        if not 0 <= round_trip_ms <= ROUND_TRIP_MS_MAX:
            return
        # half up, so that an answer is never off by more than its doubt
        doubt_ms = (round_trip_ms + 1) // 2
        offset_ms = their_time_ms - sent_boot_ms - doubt_ms
        self._testimonies[name] = Testimony(offset_ms, doubt_ms, sent_boot_ms, heard_boot_ms)

    def time_ms(self, wall_ms: int, boot_ms: int) -> int:
        """The kept time, from both clocks read now, by the table."""
        elapsed_ms = max(boot_ms - self._boot_ms, 0)
        self._boot_ms += elapsed_ms
        wall_ns = (wall_ms - self._boot_ms) * _NS
        if not self.is_attested:
            self._attest(wall_ns)
        gap_ns = wall_ns - self._offset_ns
        slew_ns = elapsed_ms * SLEW_NS_PER_MS
        if abs(gap_ns) < STEP_MS * _NS + (slew_ns if self.step is None else 0):
            self._offset_ns += max(-slew_ns, min(slew_ns, gap_ns))
            self.step = None
        else:
            self._notice(gap_ns // _NS)
            self._decide(wall_ns)
        return self._boot_ms + self._offset_ns // _NS

    def begin_at(self, time_ms: int) -> None:
        """Continue from a time that was kept before, instead of the wall clock, until witnesses
        have answered. Clocks that show an earlier time are wrong.
        """
        if not self.is_attested:
            self._floor_ns = self._offset_ns = (time_ms - self._boot_ms) * _NS

    def confirm(self, wall_ms: int) -> None:
        """An operator says that the wall clock is right."""
        if self.step is not None:
            self._believe((wall_ms - self._boot_ms) * _NS)

    def agreeing(self, within_ms: int) -> tuple[int, int]:
        """(the machines whose clocks agree with the kept time, the machines that were heard), both
        with this one.
        """
        fresh = self._fresh(self._boot_ms - FRESH_MS)
        near = sum(
            abs(testimony.offset_ms * _NS - self._offset_ns)
            <= (within_ms + testimony.doubt_ms) * _NS
            for testimony in fresh
        )
        return near + (abs(self.step_ms) <= within_ms), len(fresh) + 1

    # --- steps ------------------------------------------------------------------------------------

    def _notice(self, size_ms: int) -> None:
        if self.step is None or abs(size_ms - self.step.size_ms) > STEP_MS:
            self.step = ClockStep(size_ms, self._boot_ms, self._boot_ms)

    def _decide(self, wall_ns: int) -> None:
        step = self.step
        assert step is not None
        fresh = self._fresh(step.noticed_boot_ms)
        step.is_denied = False
        if fresh:
            testimony = _median(fresh)
            from_wall_ns, from_kept_ns = (
                abs(testimony.offset_ms * _NS - wall_ns),
                abs(testimony.offset_ms * _NS - self._offset_ns),
            )
            is_near = min(from_wall_ns, from_kept_ns) <= (STEP_MS + testimony.doubt_ms) * _NS
            if is_near and from_wall_ns < from_kept_ns:
                self._believe(wall_ns)
                self.is_attested = True
                return
            step.is_denied = is_near
        if step.is_denied:
            step.since_boot_ms = self._boot_ms
            self.is_attested = True
        elif self.accepts_alone and self._boot_ms - step.since_boot_ms >= LASTING_MS:
            self._believe(wall_ns)

    def _believe(self, wall_ns: int) -> None:
        self._offset_ns = wall_ns
        self.step = None
        self.steps_accepted += 1

    # --- witnesses --------------------------------------------------------------------------------

    def _fresh(self, asked_since_boot_ms: int) -> list[Testimony]:
        """The recent answers, sorted by the reported time."""
        for name in [
            name
            for name, testimony in self._testimonies.items()
            if self._boot_ms - testimony.heard_boot_ms > FRESH_MS
        ]:
            del self._testimonies[name]
        return sorted(
            testimony
            for testimony in self._testimonies.values()
            if testimony.sent_boot_ms >= asked_since_boot_ms
        )

    def _attest(self, wall_ns: int) -> None:
        """The first answers after the start confirm or correct the kept time."""
        fresh = self._fresh(self._start_boot_ms)
        if not fresh:
            return
        if self._floor_ns is not None:
            self._attest_since(self._floor_ns, wall_ns, fresh)
            return
        testimony = _median(fresh)
        testimony_ns = testimony.offset_ms * _NS
        if abs(testimony_ns - self._offset_ns) <= (STEP_MS + testimony.doubt_ms) * _NS:
            self.is_attested = True
        elif testimony_ns < self._offset_ns or len(fresh) > 1:
            self._offset_ns = testimony_ns
            self.step = None
            self.is_attested = True

    def _attest_since(self, floor_ns: int, wall_ns: int, fresh: list[Testimony]) -> None:
        """Take the median of all clocks, this machine's too, that are not before the time that was
        kept. Two that agree attest it.
        """
        clocks = sorted(
            [
                (wall_ns, 0),
                *((testimony.offset_ms * _NS, testimony.doubt_ms) for testimony in fresh),
            ]
        )
        since = [each for each in clocks if each[0] >= floor_ns - (STEP_MS + each[1]) * _NS]
        if not since:
            return
        self._offset_ns, doubt_ms = since[(len(since) - 1) // 2]
        self.step = None
        near = [
            abs(offset_ns - self._offset_ns) <= (STEP_MS + max(doubt_ms, other_ms)) * _NS
            for offset_ns, other_ms in since
        ]
        self.is_attested = sum(near) > 1


def _median(fresh: list[Testimony]) -> Testimony:
    return fresh[(len(fresh) - 1) // 2]


class SteadyClock:
    """A `qmq.process.event_loop.Clock` whose wall time is the kept time. Thread-safe."""

    def __init__(
        self,
        read_wall_ms: Callable[[], int] | None = None,
        read_boot_ms: Callable[[], int] | None = None,
    ) -> None:
        """Without the functions, the machine's clocks."""
        self._wall_ms, self._boot_ms = read_wall_ms or wall_ms, read_boot_ms or boot_ms
        self._reuse_ms = REUSE_MS if read_wall_ms is None else 0
        self._recent = _NEVER
        self._lock = threading.Lock()
        self.timekeeper = Timekeeper(self._wall_ms(), self._boot_ms())

    def time_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC, as kept: goes back, by more than a millisecond, only
        when a step back is accepted.
        """
        monotonic_ms = time.monotonic_ns() // _NS
        until_ms, gap_ms = self._recent
        if monotonic_ms < until_ms:
            return monotonic_ms + gap_ms
        with self._lock:
            kept_ms = self.timekeeper.time_ms(self._wall_ms(), self._boot_ms())
            self._recent = (monotonic_ms + self._reuse_ms, kept_ms - monotonic_ms)
        return kept_ms

    def monotonic_ms(self) -> int:
        """Milliseconds since some start; never goes back, and stops while the machine sleeps."""
        return time.monotonic_ns() // _NS

    def boot_ms(self) -> int:
        """The clock for timing witnesses."""
        return self._boot_ms()

    def witness(self, name: str, their_time_ms: int, sent_boot_ms: int, heard_boot_ms: int) -> None:
        with self._lock:
            self._recent = _NEVER
            self.timekeeper.witness(name, their_time_ms, sent_boot_ms, heard_boot_ms)

    def begin(self, time_ms: int, *, accepts_alone: bool) -> None:
        """See `Timekeeper.begin_at`; 0 begins with the wall clock."""
        with self._lock:
            self._recent = _NEVER
            self.timekeeper.accepts_alone = accepts_alone
            if time_ms:
                self.timekeeper.begin_at(time_ms)

    def confirm(self) -> None:
        """See `Timekeeper.confirm`."""
        with self._lock:
            self._recent = _NEVER
            wall_ms = self._wall_ms()
            self.timekeeper.time_ms(wall_ms, self._boot_ms())
            self.timekeeper.confirm(wall_ms)

    def agreeing(self, within_ms: int) -> tuple[int, int]:
        """See `Timekeeper.agreeing`."""
        with self._lock:
            return self.timekeeper.agreeing(within_ms)

    @property
    def step_ms(self) -> int:
        """See `Timekeeper.step_ms`, as of now."""
        self._recent = _NEVER
        self.time_ms()
        return self.timekeeper.step_ms

    @property
    def is_settled(self) -> bool:
        """See `Timekeeper.is_settled`; as of the last `time_ms()`."""
        return self.timekeeper.is_settled


def wall_ms() -> int:
    """The machine's wall clock."""
    return time.time_ns() // _NS


def boot_ms() -> int:
    """The machine's CLOCK_BOOTTIME; where there is none, its monotonic clock."""
    return time.clock_gettime_ns(_BOOT) // _NS
