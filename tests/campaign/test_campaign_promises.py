"""Each checker finds the broken promise that it is for, and nothing where it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from history.events import Ack, History, Operation, Poll, Record, Send
from history.ordered.events import Deliver, Handed

from campaign import table
from campaign.checkers.backups import BackupMade, RestoredRead
from campaign.checkers.dead_letters import Again, DeadCopy, Refusal, Replays, all_buried
from campaign.checkers.delayed import Arrive, Cancel, Later
from campaign.checkers.fifo import FifoReceive, FifoSend
from campaign.checkers.half import HalfCommit, all_decided_arrived
from campaign.checkers.mirrored import MirrorCopy, TargetPlace, all_copied
from campaign.checkers.moved import Postponing, all_moved_arrived
from campaign.checkers.outbox import Audited, BookedRow, Sale, SoldRow, all_booked
from campaign.checkers.parked import Refuse
from campaign.checkers.recreated import JoinedAnew, Raze, all_of_last_life
from campaign.checkers.recurring import CronRun, Recurrence, Revoke, WallClock, all_ran
from campaign.checkers.reset import Rewind, all_again
from campaign.checkers.retention import (
    AGE_MS,
    SKIPPER,
    KeptRange,
    PassingBy,
    ToldExpired,
    Uncounted,
    all_read_or_told,
)
from campaign.checkers.tiered import Garbled
from campaign.values import Evidence

Q = "campaign/0@g1"
SECOND = 1_000_000_000
DAY_MS = 86_400_000


def timed(events: Sequence[Operation]) -> list[Operation]:
    """Events without a time happen one second apart."""
    return [
        each if each.t_ns else replace(each, t_ns=at * SECOND) for at, each in enumerate(events, 1)
    ]


def found(workload: str, events: Sequence[Operation], *, drained: bool = True) -> dict[str, int]:
    """What the checkers of a workload find."""
    work = table.workloads()[workload]
    evidence = Evidence(
        history=History(timed(events)),  # type: ignore[arg-type]
        is_drained=drained,
        groups=work.groups,
        strict=work.strict,
    )
    names = {name: len(list(table.checkers()[name].find(evidence))) for name in work.checkers}
    return {name: count for name, count in names.items() if count}


def sent(value: int, at: int) -> list[Operation]:
    begun = Send(process="p", type="invoke", subject="campaign", values=(value,))
    return [begun, replace(begun, type="ok", queue=Q, sequence=at)]


def got(
    value: int, at: int, group: str = "workers", *, attempt: int = 1, by: str = "c"
) -> list[Operation]:
    begun = Poll(process=by, type="invoke", group=group)
    return [begun, replace(begun, type="ok", queue=Q, records=(Record(at, value, attempt),))]


def done(at: int, group: str = "workers", *, by: str = "c") -> list[Operation]:
    begun = Ack(process=by, type="invoke", group=group, queue=Q, sequences=(at,))
    return [begun, replace(begun, type="ok")]


# --- dead letters ---------------------------------------------------------------------------------

REFUSED = Refusal(
    process="c", type="info", group="workers", queue=Q, sequence=4, value=7, attempt=3, how="nack"
)
DYING = [*sent(7, 4), *got(7, 4, attempt=3), REFUSED]
LETTER = DeadCopy(process="a", type="ok", place="g1/0/99", value=7, queue=Q, sequence=4, attempts=3)
COPY = Again(process="c", type="ok", place="g1/0/99", value=7, queue=Q, sequence=9)
REPLAYED = [*got(7, 9), COPY, *done(9)]
BURIED = [*DYING, LETTER, *REPLAYED]


def test_a_message_that_fails_for_good_is_buried_and_replayed_once() -> None:
    assert found("dead-letters", BURIED) == {}
    assert all_buried(BURIED)
    assert not all_buried([*DYING, LETTER])
    assert not all_buried(DYING)


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        (DYING, {"dead_or_done": 1}),
        ([*BURIED, *done(4)], {"dead_xor_done": 1}),
        ([*BURIED, replace(LETTER, place="g1/1/99")], {"dead_once": 1}),
        ([*DYING, replace(LETTER, attempts=1), *REPLAYED], {"dead_in_time": 1}),
        ([*BURIED, *got(7, 4, attempt=4)], {"dead_in_time": 1}),
        ([*DYING, replace(LETTER, value=8), *REPLAYED], {"letter_as_sent": 2}),
        ([*BURIED, replace(COPY, sequence=10)], {"replayed_once": 1}),
        (
            [*DYING, LETTER, Replays(process="o", type="ok", count=0, t_ns=99 * SECOND)],
            {"replay_comes": 1},
        ),
        (
            [*sent(7, 4), *got(7, 4), replace(REFUSED, attempt=1), LETTER, *REPLAYED],
            {"dead_by_itself": 1},
        ),
        ([*sent(7, 4), *got(7, 4), *got(7, 4, by="d"), *done(4)], {"late_is_stale": 1}),
    ],
)
def test_each_rule_of_dead_letters_is_checked(
    events: list[Operation], wrong: dict[str, int]
) -> None:
    assert found("dead-letters", events) == wrong


def test_a_rejected_message_may_die_of_its_first_attempt() -> None:
    rejected = replace(REFUSED, attempt=1, how="reject")
    events = [*sent(7, 4), *got(7, 4), rejected, replace(LETTER, attempts=1), *REPLAYED]
    assert found("dead-letters", events) == {}


# --- delayed messages -----------------------------------------------------------------------------

LATER = [
    Later(process="p", type="invoke", values=(7,), due_ms=(DAY_MS,)),
    Later(process="p", type="ok", values=(7,), due_ms=(DAY_MS,)),
]
MOVED = [
    Postponing(process="p", type="invoke", value=7, until_ms=5_000),
    Postponing(process="p", type="ok", value=7, until_ms=5_000),
]
CAME = Arrive(process="c", type="ok", value=7, queue=Q, sequence=1, stored_ms=5_100)
OTHER = [replace(each, values=(8,), due_ms=(5_000,)) for each in LATER]
OTHER_CAME = replace(CAME, value=8, sequence=2)


def test_a_moved_message_comes_at_its_new_time() -> None:
    assert found("moved", [*LATER, *MOVED, CAME]) == {}
    assert found("moved", [*LATER, *OTHER, OTHER_CAME]) == {}, "it is due after the run"
    refused = replace(MOVED[1], type="fail")
    assert found("moved", [*LATER, MOVED[0], refused, *OTHER, OTHER_CAME]) == {}
    assert not all_moved_arrived([*LATER, *MOVED, *OTHER, OTHER_CAME])


def test_each_rule_of_moved_messages_is_checked() -> None:
    assert found("moved", [*LATER, *MOVED, *OTHER, OTHER_CAME]) == {"moved_comes": 1}
    early = replace(CAME, stored_ms=4_900)
    assert found("moved", [*LATER, *MOVED, early]) == {"moved_in_time": 1}
    refused = replace(MOVED[1], type="fail")
    assert found("moved", [*LATER, MOVED[0], refused, CAME]) == {"moved_in_time": 1}


HALF = [replace(each, due_ms=(20_000,)) for each in LATER]
COMMIT = [HalfCommit(process="p", type=end, value=7) for end in ("invoke", "ok")]


def test_a_half_message_comes_when_it_is_committed() -> None:
    assert found("half", [*HALF, *COMMIT, CAME]) == {}
    assert found("half", [*HALF, COMMIT[0], CAME]) == {}, "its sender died"
    assert found("half", HALF) == {}
    cancelled = Cancel(process="k", type="ok", value=7)
    assert found("half", [*HALF, *COMMIT, cancelled]) == {}
    assert not all_decided_arrived([*HALF, *COMMIT])


def test_each_rule_of_half_messages_is_checked() -> None:
    assert found("half", [*HALF, *COMMIT]) == {"committed_comes": 1}
    assert found("half", [*HALF, CAME]) == {"half_waits": 1}
    refused = replace(COMMIT[1], type="fail")
    assert found("half", [*HALF, COMMIT[0], refused, CAME]) == {"half_waits": 1}


MINUTE = 60_000
RECURS = [
    Recurrence(process="p", type=end, value=7, start_ms=MINUTE // 2) for end in ("invoke", "ok")
]


def runs(*stored_ms: int) -> list[Operation]:
    return [
        CronRun(process="c", type="ok", value=7, queue=Q, sequence=at, stored_ms=each, id=at)
        for at, each in enumerate(stored_ms)
    ]


CLOCK = WallClock(process="c", type="ok", now_ms=3 * MINUTE + 20_000)
RUNS = runs(MINUTE + 100, 2 * MINUTE + 100, 3 * MINUTE + 100)


def test_each_tick_of_a_recurring_message_comes_once() -> None:
    late = runs(3 * MINUTE + 7_000, 3 * MINUTE + 7_500, 3 * MINUTE + 8_000)
    assert found("recurring", [*RECURS, *RUNS, CLOCK]) == {}
    assert found("recurring", [*RECURS, *late, CLOCK]) == {}
    assert all_ran([*RECURS, *RUNS, CLOCK])
    assert all_ran([CLOCK, *RUNS, *RECURS]), "files of processes are read in any order"
    assert not all_ran([*RECURS, *RUNS[:2], CLOCK])


def test_each_rule_of_recurring_messages_is_checked() -> None:
    assert found("recurring", [*RECURS, *RUNS[:2], CLOCK]) == {"every_tick_comes": 1}
    early = runs(MINUTE + 100, MINUTE + 200, 3 * MINUTE + 100)
    assert found("recurring", [*RECURS, *early, CLOCK]) == {"tick_in_time": 1}
    twice = replace(RUNS[2], id=1)  # type: ignore[call-arg]
    assert found("recurring", [*RECURS, *RUNS[:2], twice, CLOCK]) == {"tick_once": 1}
    revoked = Revoke(process="p", type="ok", value=7, now_ms=2 * MINUTE + 500)
    assert found("recurring", [*RECURS, revoked, *RUNS, CLOCK]) == {"revoked_ends": 1}
    assert found("recurring", [*RUNS, CLOCK]) == {"run_no_phantom": 3}


# --- parked keys ----------------------------------------------------------------------------------


def handed(*serials: int, by: str = "c") -> Operation:
    return Deliver(
        process=by,
        type="ok",
        group="careful",
        partition=1,
        first=0,
        end=64,
        token=1,
        version=1,
        handed=tuple(Handed(each, "k", "p", each) for each in serials),
    )


def refused(serial: int) -> Operation:
    return Refuse(
        process="c",
        type="info",
        group="careful",
        partition=1,
        token=1,
        key="k",
        producer="p",
        serial=serial,
        attempt=1,
        how="fail",
    )


def passed(*events: Operation) -> int:
    evidence = Evidence(history=History(events), is_drained=True)  # type: ignore[arg-type]
    return len(list(table.checkers()["parked_waits"].find(evidence)))


def test_a_refused_message_holds_up_its_key() -> None:
    assert passed(handed(1), handed(2), refused(2), handed(2), handed(3)) == 0
    assert passed(handed(1), refused(1), handed(1), refused(1), handed(1), handed(2)) == 0
    assert passed(handed(1), handed(2), refused(2), handed(3)) == 1
    assert passed(handed(1), refused(1), handed(1), refused(1), handed(2), handed(3)) == 1


# --- retention ------------------------------------------------------------------------------------

OLD = AGE_MS // 1000 + 1


def kept(first: int, end: int, at_s: int) -> Operation:
    return KeptRange(process="w", type="ok", queue=Q, first=first, end=end, t_ns=at_s * SECOND)


def told(group: str, first: int, end: int) -> list[Operation]:
    passing = PassingBy(
        process="c", type="ok", group=group, queue=Q, from_sequence=first, to_sequence=end
    )
    return [ToldExpired(process="c", type="ok", group=group), replace(passing, t_ns=50 * SECOND)]


READ = [*got(7, 0, "keen"), *got(7, 0, "slow"), *got(7, 0, SKIPPER)]


def test_old_messages_are_deleted_and_groups_are_told() -> None:
    assert found("retention-age", [*sent(7, 0), *READ, kept(1, 1, 2 + OLD)]) == {}
    lagging = [*sent(7, 0), *got(7, 0, "keen"), *got(7, 0, SKIPPER), *told("slow", 0, 1)]
    assert found("retention-age", lagging) == {}
    assert all_read_or_told(("keen", "slow"))(lagging)
    assert not all_read_or_told(("keen", "slow"))(lagging[:-1])


def test_each_rule_of_retention_is_checked() -> None:
    assert found("retention-age", [*sent(7, 0), *READ, kept(1, 1, 5)]) == {"kept_while_young": 1}
    assert found("retention-size", [*sent(7, 0), *READ, kept(1, 9, 20)]) == {"kept_while_few": 1}
    assert found("retention-size", [*sent(7, 0), *READ, kept(1, 999, 20)]) == {}
    skipped = [*sent(7, 0), *sent(8, 1), *READ]
    skipped += [*got(8, 1, "keen"), *got(8, 1, SKIPPER), *got(8, 1, "slow")]
    unsaid = [each for each in skipped if each not in got(7, 0, "slow")]
    assert found("retention-age", unsaid) == {"deleted_is_said": 1}
    counted = Uncounted(process="w", type="ok", group="slow", queue=Q, count=1)
    assert found("retention-age", [*unsaid, counted]) == {}
    young = [*sent(7, 0), *got(7, 0, "keen"), *got(7, 0, SKIPPER), *told("slow", 0, 1)]
    young[-1] = replace(young[-1], t_ns=0)
    assert found("retention-age", young) == {"passed_is_old": 1}
    asked = [*sent(7, 0), *READ, ToldExpired(process="c", type="ok", group=SKIPPER)]
    assert found("retention-age", asked) == {"skip_goes_on": 1}


# --- groups that are moved ------------------------------------------------------------------------


def moved(group: str, to_sequence: int, at_ms: int = 0, end: str = "ok") -> list[Operation]:
    begun = Rewind(process="o", type="invoke", group=group, to=group, at_ms=at_ms, now_ms=9_000)
    if end != "ok":
        return [begun]
    return [begun, replace(begun, type="ok", queue=Q, to_sequence=to_sequence)]


SEEN = [*sent(7, 0), *sent(8, 1), *got(7, 0, "earliest"), *got(8, 1, "earliest")]


def test_after_a_reset_everything_from_its_place_on_comes() -> None:
    again = [*got(7, 0, "earliest"), *got(8, 1, "earliest")]
    assert found("reset", [*SEEN, *moved("earliest", 0), *again]) == {}
    assert found("reset", [*SEEN, *moved("earliest", 0, end="info")]) == {}
    assert found("reset", [*SEEN, *moved("latest", 2)]) == {}
    assert not all_again(timed([*SEEN, *moved("earliest", 0)]))


def test_each_rule_of_resets_is_checked() -> None:
    assert found("reset", [*SEEN, *moved("earliest", 0)]) == {"reset_gives_all": 1}
    assert found("reset", [*SEEN, *moved("earliest", 2)]) == {"reset_to_place": 1}
    behind = [*SEEN, *moved("latest", 1), *got(8, 1, "latest")]
    assert found("reset", behind) == {"reset_to_place": 1}
    # The reset begins at 9 s; the messages were stored at 2 s and 4 s.
    late = [*SEEN, *moved("time", 0, at_ms=3_500), *got(7, 0, "time"), *got(8, 1, "time")]
    assert found("reset", late) == {"reset_to_place": 1}
    early = [*SEEN, *moved("time", 2, at_ms=1_000)]
    assert found("reset", early) == {"reset_to_place": 1}
    right = [*SEEN, *moved("time", 1, at_ms=2_900), *got(8, 1, "time")]
    assert found("reset", right) == {}


# --- subjects that are deleted --------------------------------------------------------------------

JOINED = JoinedAnew(process="c", type="ok", group="settlers")
RAZED = [Raze(process="o", type=end) for end in ("invoke", "ok")]


def test_a_new_subject_has_nothing_of_the_old_one() -> None:
    later = [*sent(8, 1), JOINED, *got(8, 1, "settlers")]
    assert found("recreated", [*sent(7, 0), *RAZED, *later]) == {}
    unanswered = [*sent(7, 0), RAZED[0], JOINED, *got(7, 0, "settlers")]
    assert found("recreated", unanswered) == {}
    held = [JOINED, *sent(7, 0), *RAZED, *got(7, 0, "settlers")]
    assert found("recreated", held) == {}, "a client may hold it"
    assert not all_of_last_life(timed([*RAZED, *sent(8, 1)]))


def test_each_rule_of_recreated_subjects_is_checked() -> None:
    old = [*sent(7, 0), *RAZED, JOINED, *got(7, 0, "settlers")]
    assert found("recreated", old) == {"nothing_of_the_old": 1}
    assert found("recreated", [*RAZED, *sent(8, 1)]) == {"recreated_keeps": 1}


# --- transactions of databases --------------------------------------------------------------------

SOLD = [
    Sale(process="s", type="invoke", value=7),
    Sale(process="s", type="ok", value=7),
    SoldRow(process="a", type="ok", value=7, row=1),
]
BOOKED = BookedRow(process="a", type="ok", value=7, row=1)
AUDITS = [Audited(process="a", type="ok")] * 2


def test_a_committed_sale_is_booked_once() -> None:
    assert found("outbox", [*SOLD, BOOKED, BOOKED, *AUDITS]) == {}
    assert found("outbox", [BOOKED]) == {}, "its sale was not looked for yet"
    assert all_booked([*SOLD, BOOKED, *AUDITS])
    assert not all_booked([*SOLD, BOOKED])
    assert not all_booked([*SOLD, *AUDITS])


def test_each_rule_of_the_outbox_is_checked() -> None:
    assert found("outbox", [*SOLD, *AUDITS]) == {"outbox_comes": 1}
    assert found("outbox", [BOOKED, *AUDITS]) == {"outbox_no_phantom": 1}
    assert found("outbox", [*SOLD, BOOKED, replace(BOOKED, row=2)]) == {"effect_once": 1}


# --- other clusters, other clients ----------------------------------------------------------------

STORED = sent(7, 0)
BACKUP = [BackupMade(process="k", type=end, op=0) for end in ("invoke", "ok")]


def restored(group: str, *records: tuple[int, int]) -> Operation:
    rows = tuple(Record(*each) for each in records)
    return RestoredRead(process="k", type="ok", op=0, group=group, queue=Q, records=rows)


def acked(value: int) -> list[Operation]:
    begun = Ack(process="c", type="invoke", group="reader", queue=Q, values=(value,))
    return [begun, replace(begun, type="ok")]


GOT = got(7, 0, "reader")


def test_a_restored_cluster_has_what_was_acknowledged() -> None:
    whole = [*STORED, *BACKUP, restored("auditor", (0, 7)), restored("reader", (0, 7)), *GOT]
    assert found("backups", whole) == {}
    settled = [*STORED, *GOT, *acked(7), *BACKUP, restored("auditor", (0, 7)), restored("reader")]
    assert found("backups", settled) == {}
    assert found("backups", [*BACKUP, *STORED, *GOT, restored("auditor")]) == {}


def test_each_rule_of_backups_is_checked() -> None:
    lacking = [*STORED, *GOT, *BACKUP, restored("auditor")]
    assert found("backups", lacking) == {"backup_has_all": 1}
    strange = [*STORED, *GOT, *BACKUP, restored("auditor", (0, 7), (1, 9))]
    assert found("backups", strange) == {"backup_no_phantom": 1}
    again = [*STORED, *GOT, *acked(7), *BACKUP, restored("reader", (0, 7))]
    assert found("backups", again) == {"backup_has_progress": 1}
    assert found("backups", [*STORED, *GOT, *BACKUP, restored("reader")]) == {
        "restored_continues": 1
    }


COPIED = MirrorCopy(process="w", type="ok", value=7, queue=Q, sequence=0)
PLACE = TargetPlace(process="w", type="ok", group="reader", queue=Q, next_sequence=1)


def test_a_mirror_copies_once_and_is_not_ahead() -> None:
    assert found("mirrored", [*STORED, COPIED, *acked(7), PLACE]) == {}
    assert found("mirrored", [*STORED, COPIED, acked(7)[0], PLACE]) == {}
    assert not all_copied(STORED)


def test_each_rule_of_mirrors_is_checked() -> None:
    assert found("mirrored", STORED) == {"copy_no_loss": 1}
    assert found("mirrored", [*STORED, COPIED, replace(COPIED, sequence=1)]) == {"copy_once": 1}
    assert found("mirrored", [COPIED]) == {"copy_no_phantom": 1}
    assert found("mirrored", [*STORED, COPIED, PLACE]) == {"mirror_not_ahead": 1}


def fifo(serial: int, end: str = "ok") -> list[Operation]:
    begun = FifoSend(process="s", type="invoke", key="g", serial=serial)
    return [begun, replace(begun, type=end)]  # type: ignore[arg-type]


def took(serial: int) -> Operation:
    return FifoReceive(process="r", type="ok", producer="s", key="g", serial=serial, attempt=1)


def test_messages_of_a_group_come_in_order() -> None:
    assert found("fifo", [*fifo(1), *fifo(2), took(1), took(2), took(1)]) == {}
    assert found("fifo", [*fifo(1, "info"), *fifo(2), took(2)]) == {}
    assert found("fifo", [*fifo(1), *fifo(2), took(2), took(1)]) == {"fifo_order": 1}
    assert found("fifo", [*fifo(1), *fifo(2), took(2)]) == {"fifo_comes": 1}
    assert found("fifo", [took(1)]) == {"fifo_no_phantom": 1}


def test_a_body_that_changed_in_the_store_is_reported() -> None:
    events = [*sent(7, 0), *got(7, 0, "historian")]
    assert found("tiered", events) == {}
    changed = Garbled(process="r", type="info", value=7, queue=Q, sequence=0)
    assert found("tiered", [*events, changed]) == {"tiered_same": 1}
