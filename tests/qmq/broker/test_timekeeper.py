"""The time that is kept: the table of qmq/broker/timekeeper.py, what happens to machines, and a
model that recomputes it from all it saw."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forms import examples

from qmq.broker.timekeeper import SteadyClock, Timekeeper

T0, HOUR = 1_700_000_000_000, 3_600_000


class Machine:
    """A true time that runs; a wall clock and a timekeeper that may be off from it."""

    def __init__(self, *, wall_off: int = 0, ppm: int = 0) -> None:
        self.true_ms = T0
        self.boot_ms = 5000
        self.wall_off = wall_off
        self.ppm = ppm
        self.timekeeper = Timekeeper(self.wall_ms, self.boot_ms)

    @property
    def wall_ms(self) -> int:
        return self.true_ms + self.wall_off + (self.true_ms - T0) * self.ppm // 1_000_000

    @property
    def off(self) -> int:
        """How far the kept time is ahead of the true time, now."""
        return self.timekeeper.time_ms(self.wall_ms, self.boot_ms) - self.true_ms

    def run(
        self, ms: int, *, every: int = 1000, witnesses: dict[str, int] | None = None
    ) -> list[int]:
        """Time passes; how far the kept time was off, each time it was read. Witnesses say the true
        time and their error.
        """
        seen = [self.off]
        for _ in range(ms // every):
            self.true_ms += every
            self.boot_ms += every
            seen.append(self.off)
            for name, error in (witnesses or {}).items():
                self.hear(name, error)
                seen.append(self.off)
        return seen

    def hear(self, name: str, error: int = 0, *, took: int = 4) -> None:
        self.timekeeper.witness(
            name, self.true_ms + error - took // 2, self.boot_ms - took, self.boot_ms
        )

    def attested(self) -> Machine:
        self.boot_ms += 10
        self.true_ms += 10
        self.hear("first")
        assert self.off == 0
        assert self.timekeeper.is_attested
        self.run(20_000)
        return self


HONEST = {"a": 0, "b": 3, "c": -2}


# --- the table ------------------------------------------------------------------------------------


def test_the_kept_time_never_goes_back_while_it_is_pulled() -> None:
    machine = Machine().attested()
    machine.wall_off = -900
    last = 0
    for _ in range(5000):
        machine.run(1, every=1)
        now = machine.timekeeper.time_ms(machine.wall_ms, machine.boot_ms)
        assert now >= last
        last = now


@pytest.mark.parametrize("wall_off", [HOUR, -HOUR, 1000, -1000])
def test_a_step_without_witnesses_is_accepted_after_a_minute(wall_off: int) -> None:
    machine = Machine().attested()
    machine.wall_off = wall_off
    assert set(machine.run(59_000)) == {0}
    assert machine.timekeeper.step_ms == wall_off
    assert machine.run(1000)[-1] == wall_off
    assert machine.timekeeper.step_ms == 0
    assert machine.timekeeper.steps_accepted == 1


@pytest.mark.parametrize("wall_off", [HOUR, -HOUR])
def test_a_step_that_witnesses_confirm_is_accepted_at_once(wall_off: int) -> None:
    machine = Machine().attested()
    machine.wall_off = wall_off
    assert machine.off == 0
    machine.run(100, every=10)
    machine.hear("a", wall_off + 900)
    assert machine.off == wall_off


@pytest.mark.parametrize("wall_off", [HOUR, -HOUR])
def test_a_step_is_not_accepted_as_long_as_witnesses_deny_it(wall_off: int) -> None:
    machine = Machine().attested()
    machine.wall_off = wall_off
    assert set(machine.run(2 * HOUR, witnesses={"a": 20})) == {0}
    assert machine.timekeeper.step is not None
    assert machine.timekeeper.step.is_denied


def test_the_median_decides_and_of_an_even_number_the_earlier_one() -> None:
    machine = Machine().attested()
    machine.wall_off = HOUR
    machine.run(1000)
    for name, error in (("a", 0), ("b", HOUR), ("liar", 7 * HOUR)):
        machine.hear(name, error)
        if name == "b":
            assert machine.off == 0
    assert machine.off == HOUR


def test_a_late_answer_does_not_count_as_a_witness() -> None:
    machine = Machine().attested()
    machine.wall_off = HOUR
    machine.run(5000)
    machine.hear("slow", HOUR, took=2002)
    assert machine.off == 0
    machine.timekeeper.witness(
        "from the future", machine.wall_ms, machine.boot_ms + 1, machine.boot_ms
    )
    assert machine.off == 0
    machine.hear("quick", HOUR, took=2000)
    assert machine.off == HOUR


def test_a_word_agrees_within_a_second_and_its_doubt() -> None:
    for error, took, is_accepted in (
        (1000, 0, True),
        (1001, 0, False),
        (-1500, 1000, True),
        (-1501, 1000, False),
    ):
        machine = Machine().attested()
        machine.wall_off = HOUR
        machine.run(5000)
        machine.hear("a", HOUR + error, took=took)
        assert machine.off == (HOUR if is_accepted else 0)


def test_an_uncertain_time_supports_the_clock_that_it_is_nearer_to() -> None:
    machine = Machine().attested()
    machine.wall_off = 1500
    machine.run(5000)
    for nearer_to_kept in (700, 750):
        machine.hear("a", nearer_to_kept, took=1600)
        assert machine.off == 0
    machine.hear("a", 800, took=1600)
    assert machine.off == 1500


# --- the start ------------------------------------------------------------------------------------


def test_a_process_is_settled_when_witnesses_spoke_or_after_three_seconds() -> None:
    alone, attested = Machine(), Machine()
    assert not alone.timekeeper.is_settled
    alone.run(3000)
    assert alone.timekeeper.is_settled
    assert alone.timekeeper.wants_witnesses
    attested.run(100, every=10)
    attested.hear("a", 400)
    attested.run(1, every=1)
    assert attested.timekeeper.is_settled
    assert not attested.timekeeper.wants_witnesses


def test_a_clock_that_was_ahead_at_the_start_is_put_right_by_the_first_witness() -> None:
    machine = Machine(wall_off=HOUR)
    machine.run(100, every=10)
    machine.hear("a")
    assert machine.off == 0
    assert machine.timekeeper.is_settled
    assert machine.timekeeper.step_ms == HOUR
    assert set(machine.run(HOUR, witnesses={"a": 0})) == {0}
    machine.wall_off = 0
    assert set(machine.run(5000)) == {0}
    assert machine.timekeeper.step_ms == 0


def test_a_clock_that_was_behind_at_the_start_is_put_right_by_two() -> None:
    machine = Machine(wall_off=-HOUR)
    machine.run(100, every=10)
    machine.hear("a")
    assert machine.off == -HOUR
    machine.hear("b", 200)
    assert machine.off == 0


def test_ntp_that_corrects_a_wrong_clock_after_the_boot_is_accepted() -> None:
    for wall_off in (HOUR, -HOUR):
        machine = Machine(wall_off=wall_off)
        assert set(machine.run(20_000)) == {wall_off}
        machine.wall_off = 0
        assert machine.off == wall_off
        machine.run(100, every=10)
        machine.hear("a")
        assert machine.off == 0
        assert machine.timekeeper.is_attested


# --- what happens to machines ---------------------------------------------------------------------


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
@pytest.mark.parametrize("witnesses", [{}, HONEST])
def test_an_hour_and_back_within_a_minute_moves_nothing(
    jump: int, witnesses: dict[str, int]
) -> None:
    machine = Machine().attested()
    machine.wall_off = jump
    seen = machine.run(55_000, witnesses=witnesses)
    machine.wall_off = 0
    seen += machine.run(HOUR, witnesses=witnesses)
    assert set(seen) == {0}


def test_a_drift_of_200_ppm_is_followed() -> None:
    machine = Machine(ppm=200).attested()
    machine.run(24 * HOUR, every=1000)
    assert machine.timekeeper.steps_accepted == 0
    assert abs(machine.off - (machine.wall_ms - machine.true_ms)) <= 2


def test_a_machine_that_slept_notices_no_step() -> None:
    machine = Machine(ppm=200).attested()
    machine.run(8 * HOUR, every=8 * HOUR)
    assert machine.timekeeper.step_ms == 0
    assert abs(machine.off - (machine.wall_ms - machine.true_ms)) <= 2


def test_a_frozen_machine_is_late_until_its_clock_is_put_right_and_never_early() -> None:
    machine = Machine().attested()
    machine.true_ms += 600_000
    machine.wall_off = -600_000
    assert set(machine.run(30_000, witnesses=HONEST)) == {-600_000}
    machine.wall_off = 0
    assert machine.off == -600_000
    assert machine.run(2000, witnesses=HONEST)[-1] == 0


def test_the_steady_clock_tells_the_machines_time_and_hears_witnesses() -> None:
    clock = SteadyClock()
    wall = clock.time_ms()
    boot = clock.boot_ms()
    clock.witness("a", wall - HOUR, boot, boot)
    assert abs(clock.time_ms() - (wall - HOUR)) < 60_000
    assert abs(clock.step_ms - HOUR) < 2000
    assert clock.is_settled
    assert clock.monotonic_ms() <= clock.monotonic_ms()


# --- the model ------------------------------------------------------------------------------------


@dataclass
class Model:
    """The simplest model of the table: the state is everything read and heard, and the offset is a
    list of its values.
    """

    readings: list[tuple[float, float]] = field(default_factory=list)
    """(boot, wall - boot)"""
    offsets: list[float] = field(default_factory=list)
    """The offset after each reading."""
    gaps: list[float | None] = field(default_factory=list)
    """For each reading, the step that was left undecided."""
    denials: list[float] = field(default_factory=list)
    words: list[tuple[str, float, float, float, float]] = field(default_factory=list)
    """(name, offset, doubt, sent, heard)"""
    attested: bool = False

    def heard(self, since: float) -> list[tuple[float, float]]:
        boot = self.readings[-1][0]
        latest = {word[0]: word for word in self.words}
        return sorted(
            (off, doubt)
            for _, off, doubt, sent, heard in latest.values()
            if boot - heard <= 10_000 and sent >= since
        )

    def read(self, wall: int, boot: int) -> float:
        self.readings.append((boot, wall - boot))
        if len(self.readings) == 1:
            self.gaps.append(None)
            self.offsets.append(wall - boot)
            return wall
        elapsed, target = boot - self.readings[-2][0], wall - boot
        before = self.gaps[-1]
        offset, before = self.start(self.offsets[-1], before)
        gap, slew = target - offset, elapsed * 0.0005
        if abs(gap) < 1000 + (slew if before is None else 0):
            offset += max(-slew, min(slew, gap))
            self.gaps.append(None)
        else:
            offset = self.decide(offset, target, gap // 1, before)
        self.offsets.append(offset)
        return boot + offset

    def start(self, offset: float, before: float | None) -> tuple[float, float | None]:
        words = self.heard(self.readings[0][0])
        if self.attested or not words:
            return offset, before
        said, doubt = words[(len(words) - 1) // 2]
        if abs(said - offset) <= 1000 + doubt:
            self.attested = True
        elif said < offset or len(words) >= 2:
            self.attested = True
            return said, None
        return offset, before

    def decide(self, offset: float, target: float, gap: float, before: float | None) -> float:
        size = before if before is not None and abs(gap - before) <= 1000 else gap
        boot = self.readings[-1][0]
        noticed = boot
        if size == before:
            for at in range(len(self.gaps) - 1, -1, -1):
                if self.gaps[at] != before or at in self.breaks:
                    break
                noticed = self.readings[at][0]
        if size != before or before is None:
            self.breaks.add(len(self.gaps) - 1)
        self.gaps.append(size)
        for said, doubt in self.middle(noticed):
            if min(abs(said - target), abs(said - offset)) <= 1000 + doubt:
                self.attested = True
                if abs(said - target) < abs(said - offset):
                    self.gaps[-1] = None
                    return target
                self.denials.append(boot)
                return offset
        if boot - max([noticed, *[at for at in self.denials if at >= noticed]]) >= 60_000:
            self.gaps[-1] = None
            return target
        return offset

    breaks: set[int] = field(default_factory=set)
    """Readings after which another step began."""

    def middle(self, since: float) -> list[tuple[float, float]]:
        words = self.heard(since)
        return [words[(len(words) - 1) // 2]] if words else []


steps = st.sampled_from([0, 0, 0, 300, -300, 999, 1000, -1001, 1600, HOUR, -HOUR, HOUR + 500])
moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("run"), st.sampled_from([1, 10, 500, 1000, 5000, 20_000, 60_000]), st.just(0)
        ),
        st.tuples(st.just("set"), steps, st.just(0)),
        st.tuples(
            st.sampled_from(["a", "b", "c"]), steps, st.sampled_from([0, 2, 40, 1000, 2000, 3000])
        ),
    ),
    max_size=60,
)


@settings(max_examples=examples(400), deadline=None)
@given(moves)
def test_the_keeper_is_what_the_model_is_whatever_happens(
    moves: list[tuple[str, int, int]],
) -> None:
    true, boot, off = T0, 10_000, 0
    timekeeper, model = Timekeeper(true, boot), Model()
    model.read(true, boot)
    for kind, amount, took in moves:
        if kind == "run":
            true, boot = true + amount, boot + amount
        elif kind == "set":
            off = amount
        else:
            timekeeper.witness(kind, true + amount - took // 2, boot - took, boot)
            if took <= 2000:
                model.words.append((kind, true + amount - boot, took / 2, boot - took, boot))
        assert abs(timekeeper.time_ms(true + off, boot) - model.read(true + off, boot)) <= 1
        assert (timekeeper.step_ms != 0) == (model.gaps[-1] is not None)
        assert timekeeper.is_attested == model.attested


@settings(max_examples=examples(200), deadline=None)
@given(moves)
def test_the_kept_time_moves_by_itself_or_to_where_the_wall_clock_or_a_witness_is(
    moves: list[tuple[str, int, int]],
) -> None:
    true, boot, off = T0, 10_000, 0
    timekeeper = Timekeeper(true, boot)
    kept, said = true, {T0}
    for kind, amount, took in moves:
        elapsed = amount if kind == "run" else 0
        true, boot = true + elapsed, boot + elapsed
        said = {each + elapsed for each in said}
        if kind == "set":
            off = amount
        elif kind != "run":
            timekeeper.witness(kind, true + amount - took // 2, boot - took, boot)
            said.add(true + amount)
        now = timekeeper.time_ms(true + off, boot)
        is_own_pace = abs(now - kept - elapsed) <= elapsed * 0.0005 + 1
        assert is_own_pace or now == true + off or now in said
        assert abs(timekeeper.step_ms) >= 1000 or timekeeper.step is None
        kept = now
