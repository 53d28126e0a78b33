"""Each finding, on a snapshot in which one thing is not as it should be; and none where all is
well.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from snapshots import (
    NOW_MS,
    PROCESS,
    STORAGE,
    WELL,
    broker_group,
    changed,
    dead_letters,
    delay_group,
    earlier,
    group,
    queue,
    replica,
    route,
    with_replica,
)
from typer.main import get_command

from qmq.cli.app import app
from qmq.console.wording import translated
from qmq.operations.findings import KINDS, findings
from qmq.operations.snapshot import (
    ClusterSnapshot,
    DelayTroubleFacts,
    GroupProgress,
    MetaserverFacts,
    PauseFacts,
    RouteChangeFacts,
    StorageFacts,
    StoreMemberFacts,
    SubjectFacts,
)
from qmq.operations.text import (
    Finding,
    Severity,
    Thresholds,
    folded,
    in_words,
    size_in_words,
    worst,
)

NOTICE, WARNING, CRITICAL = Severity.NOTICE, Severity.WARNING, Severity.CRITICAL
STUCK = RouteChangeFacts("split", 2, "sealed", NOW_MS - 200_000)
FULL = group("orders", "billing", progress=(GroupProgress(3, "g1", 0, 0, 0, is_full=True),))
UNHELD = group("orders", "billing", progress=(GroupProgress(7, "g1", 0, 5, 1_000, is_unheld=True),))
OLD_UNFLUSHED = StorageFacts(
    STORAGE.disk_free_bytes, STORAGE.disk_reserved_bytes, 1, 2_000_000, 95_000
)
LOST = broker_group(
    "g1",
    replica("g1-a"),
    replica("g1-b", None, is_present=False),
    replica("g1-c", None, is_present=False),
)

ETCD_WELL = (StoreMemberFacts("etcd0:2379", "3.6.5"), StoreMemberFacts("etcd1:2379", "3.5.3"))
ETCD = (ETCD_WELL[0], StoreMemberFacts("etcd1:2379", failure="no answer within 1 s"))

Case = tuple[str, ClusterSnapshot] | tuple[str, ClusterSnapshot, ClusterSnapshot]
"""SEVERITY code: what is said; the snapshot, and perhaps the one before."""
FORK = (
    "knows that the entries up to 7 are committed, and the master g1-a of epoch 4 has other "
    "entries, or none, after 5: "
    "acknowledged messages are missing there"
)

CASES: dict[str, Case] = {
    "a metaserver of two": (
        "WARNING metaserver-away: metaserver meta1:20880 does not answer: connection refused",
        changed(
            metaservers=(WELL.metaservers[0], MetaserverFacts("meta1:20880", "connection refused"))
        ),
    ),
    "all metaservers": (
        "CRITICAL metaserver-away: metaserver meta0:20880 does not answer: timed out",
        ClusterSnapshot(NOW_MS, 0, (MetaserverFacts("meta0:20880", "timed out"),)),
    ),
    "etcd for one metaserver": (
        "WARNING store-silent: coordination store a metaserver has got no answer from it for 42 s",
        changed(
            metaservers=(replace(WELL.metaservers[0], store_silent_ms=42_000), WELL.metaservers[1])
        ),
    ),
    "etcd for all": (
        "CRITICAL store-silent: coordination store every metaserver has got no answer from it "
        "for 42 s",
        changed(metaservers=(replace(WELL.metaservers[0], store_silent_ms=42_000),)),
    ),
    "a member of etcd": (
        "WARNING store-member-away: etcd member etcd1:2379 does not answer: no answer within 1 s",
        changed(metaservers=tuple(replace(each, store_members=ETCD) for each in WELL.metaservers)),
    ),
    "a member of etcd that one metaserver cannot reach": (
        "WARNING store-member-away: etcd member etcd1:2379 does not answer meta0:20880: no "
        "answer within 1 s",
        changed(
            metaservers=(
                replace(WELL.metaservers[0], store_members=ETCD),
                replace(WELL.metaservers[1], store_members=ETCD_WELL),
            )
        ),
    ),
    "an etcd that may corrupt its data": (
        "WARNING store-version: etcd member etcd0:2379 runs etcd 3.5.2",
        changed(
            metaservers=(
                replace(
                    WELL.metaservers[0], store_members=(StoreMemberFacts("etcd0:2379", "3.5.2"),)
                ),
            )
        ),
    ),
    "a question without an answer": (
        "WARNING not-answered: dead letters no answer: op:bob may not describe the cluster",
        changed(missing={"dead_letters": "op:bob may not describe the cluster"}),
    ),
    "a master that hangs": (
        "WARNING not-answered: broker group g2 did not answer: timed out",
        changed(silent={"g2": "timed out"}),
    ),
    "no majority": (
        "CRITICAL no-master: broker group g1 has no master: 1 of 3 voters run, and 2 are needed; "
        "subjects there: 2",
        changed(broker_groups=(LOST, broker_group("g2"))),
    ),
    "a replica that does not run": (
        "WARNING replica-away: replica g1-c of g1 does not run, or cannot reach the coordination "
        "store; if one more voter fails, g1 has no majority",
        with_replica(role=None, is_present=False),
    ),
    "a replica that hangs": (
        "WARNING replica-away: replica g1-c of g1 runs, but does not answer at g1-c:20882",
        with_replica(role=None, vote="learner"),
    ),
    "a replica behind": (
        "WARNING replica-behind: replica g1-c of g1 lacks 50,000 entries of its master's log",
        with_replica(lag_entries=50_000),
    ),
    "a replica cut off from its master": (
        "WARNING replica-behind: replica g1-c of g1 its master has got no message from it for 1 "
        "min 1 s",
        with_replica(silent_ms=61_000),
    ),
    "a replica that lost its tail": (
        "WARNING replica-incomplete: replica g1-c of g1 may lack entries that it acknowledged",
        with_replica(is_whole=False),
    ),
    "a replica whose master lacks committed entries": (
        f"CRITICAL replica-forked: replica g1-c of g1 {FORK}",
        with_replica(fork=FORK),
    ),
    "a store whose data was put back": (
        "CRITICAL store-put-back: coordination store its data was put back: its revision was 9, "
        "and is 5 (by g1-c)",
        with_replica(older_store="its revision was 9, and is 5"),
    ),
    "a group whose whole replicas are no majority": (
        "CRITICAL no-master: broker group g1 elects no master: g1-b may lack entries and has no "
        "vote, so all 3 voters are needed",
        changed(
            broker_groups=(
                broker_group(
                    "g1",
                    replica("g1-a", "slave"),
                    replica("g1-b", is_whole=False),
                    replica("g1-c", role=None),
                ),
                broker_group("g2"),
            )
        ),
    ),
    "a master that waits": (
        "WARNING master-not-serving: replica g1-a of g1 is master, and does not serve clients yet",
        changed(
            broker_groups=(
                broker_group(
                    "g1",
                    replica("g1-a", "master", is_serving=False),
                    replica("g1-b"),
                    replica("g1-c"),
                ),
            )
        ),
    ),
    "an election": (
        "NOTICE master-changed: broker group g1 its master changed from g1-a to g1-a a moment "
        "ago (epoch 4)",
        changed(broker_groups=(broker_group("g1", epoch=4), broker_group("g2"))),
        earlier(),
    ),
    "one replica": (
        "NOTICE one-voter: broker group g1 has one voter",
        changed(broker_groups=(broker_group("g1", replica("g1-a", "master")),)),
    ),
    "a drained group": (
        "NOTICE drained: broker group g1 is drained: it takes no new messages",
        changed(broker_groups=(broker_group("g1", mode="read-only"), broker_group("g2"))),
    ),
    "an insecure port": (
        "NOTICE insecure-port: replica g1-c accepts connections from other machines without "
        "certificates (--insecure)",
        with_replica(process=replace(PROCESS, is_insecure=True)),
    ),
    "a certificate in three weeks": (
        "NOTICE certificate-ends: replica g1-c its certificate ends in 21 d",
        with_replica(process=replace(PROCESS, certificate_left_ms=21 * 86_400_000)),
    ),
    "a certificate in two days": (
        "WARNING certificate-ends: replica g1-c its certificate ends in 2 d",
        with_replica(process=replace(PROCESS, certificate_left_ms=2 * 86_400_000)),
    ),
    "a certificate that ended": (
        "CRITICAL certificate-ends: replica g1-c its certificate ended 2 h ago",
        with_replica(process=replace(PROCESS, certificate_left_ms=-7_200_000)),
    ),
    "a disk that does not flush": (
        "WARNING unflushed: replica g1-c 1.91 MiB are not flushed, the oldest for 1 min 35 s",
        with_replica(storage=OLD_UNFLUSHED),
    ),
    "a damaged object": (
        "CRITICAL object-damaged: replica g1-c the object store has lost or changed "
        "g1/message/00000000000000000000/000000",
        with_replica(
            storage=replace(STORAGE, damaged_objects=("g1/message/00000000000000000000/000000",))
        ),
    ),
    "a disk nearly full": (
        "WARNING disk-full: replica g1-c is nearly full: 200 MiB are free, and 64 MiB stay "
        "reserved",
        with_replica(storage=replace(STORAGE, disk_free_bytes=200 << 20)),
    ),
    "a full disk": (
        "CRITICAL disk-full: replica g1-c refuses messages: 10 MiB are free, and 64 MiB stay "
        "reserved",
        with_replica(storage=replace(STORAGE, disk_free_bytes=10 << 20)),
    ),
    "a version that was forgotten": (
        "NOTICE version-differs: replica g1-c runs version 0.0.9; most servers run 0.1.0",
        with_replica(process=replace(PROCESS, version="0.0.9")),
    ),
    "a clock that is wrong": (
        "WARNING clocks-differ: replica g1-c its clock is 1 min 30 s ahead of the others",
        with_replica(time_ms=NOW_MS + 90_000),
    ),
    "retention that waits for an operator": (
        "WARNING retention-behind: replica g1-c of g1 its retention counts by a time 2,592,000 s "
        "behind its clock: an operator has to confirm its clock",
        with_replica(retention_behind_ms=30 * 86_400_000),
    ),
    "a clock that other machines deny": (
        "WARNING retention-behind: replica g1-c of g1 its retention counts by a time 7,200 s "
        "behind its clock: the other machines do not confirm its clock",
        with_replica(clock_step_ms=7_200_000),
    ),
    "a delay group whose clock jumped": (
        "WARNING clocks-differ: delay group d1 its master's clock is 5 s behind the time that "
        "the group keeps",
        changed(delay_groups=(delay_group(clock_step_ms=-5_000),)),
    ),
    "a subject on one group": (
        "NOTICE one-broker-group: subject flights is on g2 only",
        changed(subjects=(SubjectFacts("flights", "", ("g2",), (queue("g2"),)),)),
    ),
    "an ordered subject on one group": (
        "NOTICE one-broker-group: subject orders is on g1 only",
        changed(subjects=(SubjectFacts("orders", "strict", ("g1", "g2"), (), route("g1")),)),
    ),
    "a split that hangs": (
        "WARNING route-change-stuck: subject orders its split to version 2 has been sealed for 3 "
        "min 20 s",
        changed(
            subjects=(
                SubjectFacts("orders", "strict", ("g1", "g2"), (), route("g1", "g2", change=STUCK)),
            )
        ),
    ),
    "a group that lags": (
        "WARNING group-lags: group ops of flights is behind: 900 messages, the oldest 6 min 40 s "
        "old",
        changed(groups=(group(lag=900, lag_ms=400_000),)),
    ),
    "a group that lags more and more": (
        "WARNING group-lags: group ops of flights is behind: 900 messages, the oldest 6 min 40 s "
        "old; it grows by 400 messages/s",
        changed(groups=(group(lag=900, lag_ms=400_000),)),
        earlier(groups=(group(lag=100, lag_ms=300_000),)),
    ),
    "a group that catches up": (
        "NOTICE group-lags: group ops of flights is behind: 900 messages, the oldest 6 min 40 s "
        "old; it shrinks by 50 messages/s and ends in 18 s",
        changed(groups=(group(lag=900, lag_ms=400_000),)),
        earlier(groups=(group(lag=1_000, lag_ms=400_000),)),
    ),
    "a group without consumers": (
        "WARNING no-consumers: group ops of flights has no consumers, and messages are waiting: "
        "5 messages, the oldest 2 min old",
        changed(groups=(group(lag=5, lag_ms=120_000, consumers=0),)),
    ),
    "a paused group": (
        "NOTICE group-paused: group ops of flights is paused for 1 h (release 41); waiting: 5 "
        "messages, the oldest 15 min old",
        changed(
            groups=(group(lag=5, lag_ms=900_000, consumers=0, is_paused=True),),
            pauses=(PauseFacts("group", "*", "ops", "", NOW_MS - 3_600_000, "release 41"),),
        ),
    ),
    "a lane that nobody holds": (
        "WARNING lanes-unheld: group billing of orders no consumer reads partition 7, where "
        "messages are waiting",
        changed(groups=(UNHELD,)),
        earlier(groups=(UNHELD,)),
    ),
    "retention that was faster": (
        "WARNING retention-overtook: group ops of flights retention deleted 3,000 messages "
        "before the group received them",
        changed(
            groups=(group(progress=(GroupProgress(0, "g1", 10, 0, 0, skipped_messages=3_000),)),)
        ),
    ),
    "retries that were too late": (
        "WARNING messages-expired: group ops of flights retention deleted 3 messages before the "
        "next attempt",
        changed(groups=(group(expired_messages=7),)),
        earlier(groups=(group(expired_messages=4),)),
    ),
    "messages that cannot die": (
        "WARNING dying-messages: group ops of flights 2 messages cannot be copied to its "
        "dead-letter queue",
        changed(groups=(group(dying_messages=2),)),
        earlier(groups=(group(dying_messages=1),)),
    ),
    "old dead letters": (
        "NOTICE dead-letters: dead letters of ops 3 dead letters waiting; the newest came 1 d ago",
        changed(dead_letters=(dead_letters(3),)),
        earlier(dead_letters=(dead_letters(3),)),
    ),
    "more dead letters": (
        "WARNING dead-letters: dead letters of ops 5 dead letters waiting; the newest came 1 d ago",
        changed(dead_letters=(dead_letters(5),)),
        earlier(dead_letters=(dead_letters(3),)),
    ),
    "a recent dead letter": (
        "WARNING dead-letters: dead letters of ops 1 dead letter waiting; the newest came 30 s ago",
        changed(dead_letters=(dead_letters(1, newest_ago_ms=30_000),)),
    ),
    "parked keys": (
        "WARNING parked-keys: group billing of orders has 2 parked keys with 17 messages",
        changed(groups=(group("orders", "billing", parked_keys=2, parked_messages=17),)),
    ),
    "too many parked keys": (
        "CRITICAL parked-keys: group billing of orders has 2 parked keys with 17 messages; that "
        "is too many: it gets no more messages of partition 3 until you replay or skip keys",
        changed(
            groups=(
                group(
                    "orders",
                    "billing",
                    parked_keys=2,
                    parked_messages=17,
                    progress=(GroupProgress(3, "g", 0, 0, 0, is_full=True),),
                ),
            )
        ),
    ),
    "late deliveries": (
        "WARNING delay-behind: delay group d1 delivers late: one message in a hundred by 12 s or "
        "more in the last minute",
        changed(delay_groups=(delay_group(lateness_p99_ms=12_000),)),
    ),
    "a schedule that is loaded late": (
        "WARNING delay-behind: delay group d1 loads its schedule 1 min behind the clock",
        changed(delay_groups=(delay_group(horizon_ms=NOW_MS - 60_000),)),
    ),
    "due messages that stand still": (
        "WARNING delay-behind: delay group d1 delivers nothing, although it has 40 due messages",
        changed(delay_groups=(delay_group(waiting=40),)),
        earlier(delay_groups=(delay_group(waiting=40),)),
    ),
    "a subject that cannot be delivered to": (
        "WARNING delay-trouble: delayed messages of orders 12 due messages cannot be delivered: "
        "UnknownSubject",
        changed(
            delay_groups=(
                delay_group(troubles=(DelayTroubleFacts("orders", 12, "UnknownSubject"),)),
            )
        ),
    ),
}


def code_of(case: Case) -> str:
    return case[0].split()[1].rstrip(":")


def found_in(case: Case) -> tuple[Finding, ...]:
    return findings(case[1], case[2] if len(case) == 3 else None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_unusual_state_is_one_finding_with_a_severity(case: Case) -> None:
    assert [
        f"{each.severity.name} {each.code}: {each.about} {each.what}"
        for each in found_in(case)
        if each.code == code_of(case)
    ] == [case[0]]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_console_says_each_finding_in_chinese(case: Case) -> None:
    for each in found_in(case):
        if each.code == code_of(case):
            for text in (each.about, each.what, each.why):
                # a server's own words
                said = translated(text, "zh").removesuffix("op:bob may not describe the cluster")
                # the word is the same in both languages
                assert said != text or text == f"metaserver {text.split()[-1]}"
                assert re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", said) is None, said


def test_every_kind_of_finding_has_a_case() -> None:
    severities = {each.code: each.severities for each in KINDS}
    assert len(severities) == len(KINDS)
    assert {code_of(case) for case in CASES.values()} == severities.keys()
    for case in CASES.values():
        assert case[0].split()[0].lower() in severities[code_of(case)], case[0]


def test_nothing_is_found_where_all_is_well() -> None:
    assert findings(WELL) == ()
    assert findings(WELL, earlier()) == ()
    assert worst(()) is None


def test_a_replica_that_left_its_group_is_not_missed() -> None:
    assert findings(with_replica(role=None, vote="none", is_present=False)) == ()


def test_the_worst_comes_first() -> None:
    many = changed(
        broker_groups=(LOST, broker_group("g2", mode="read-only")),
        dead_letters=(dead_letters(1, newest_ago_ms=1_000),),
    )
    found = [each.severity for each in findings(many)]
    assert found == sorted(found, reverse=True)
    assert {NOTICE, WARNING, CRITICAL} == set(found)
    assert worst(findings(many)) is CRITICAL


def test_every_next_command_is_one_that_there_is() -> None:
    for case in CASES.values():
        for each in found_in(case):
            name, *rest = each.command.split()
            if name != "qmq":
                assert name in ("etcdctl", "timedatectl")
                continue
            command = get_command(app)
            while rest and rest[0] in getattr(command, "commands", {}):
                command, rest = command.commands[rest[0]], rest[1:]
            known = {option for parameter in command.params for option in parameter.opts} | {
                "--help"
            }
            assert not getattr(command, "commands", {}) or command.invoke_without_command, (
                each.command
            )
            assert {word for word in rest if word.startswith("--")} <= known, each.command


def test_limits_are_the_operators() -> None:
    lagging = changed(groups=(group(lag=10, lag_ms=400_000),))
    assert findings(lagging, limits=Thresholds(lag_ms=500_000)) == ()
    assert findings(lagging, limits=Thresholds(lag_ms=100_000))


def test_many_of_one_kind_are_folded_into_a_line() -> None:
    groups = tuple(group(f"s{number}", lag=9, lag_ms=400_000) for number in range(12))
    found = findings(changed(groups=groups, dead_letters=(dead_letters(),)))
    shown = folded(found)
    assert [each.about for each in shown][4:6] == ["group ops of s2", "7 more"]
    assert [each.code for each in shown].count("group-lags") == 6
    assert [each.code for each in shown].count("dead-letters") == 1
    assert folded(found[:5]) == found[:5]


def test_a_finding_is_json_with_all_that_people_see() -> None:
    (found,) = findings(with_replica(is_whole=False))
    assert isinstance(found, Finding)
    assert found.as_json() == {
        "code": "replica-incomplete",
        "severity": "warning",
        "about": "replica g1-c of g1",
        "what": "may lack entries that it acknowledged",
        "why": found.why,
        "command": "qmq cluster status --watch",
    }


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1 s"),
        (59_999, "59 s"),
        (200_000, "3 min 20 s"),
        (3_600_000, "1 h"),
        (190_800_000, "2 d 5 h"),
    ],
)
def test_durations_are_shown_in_their_largest_unit(duration_ms: int, text: str) -> None:
    assert in_words(duration_ms) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (2048, "2 KiB"), (64 << 20, "64 MiB"), (5 << 50, "5.12e+03 TiB")],
)
def test_sizes_are_shown_in_binary_units(size: int, text: str) -> None:
    assert size_in_words(size) == text
