"""Delivery settings and pauses as keys and values: round trips, the most specific record, paused
groups.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qmq_coordination.coordination_store import (
    KeyListing,
    KeyValue,
    Revision,
    WatchedChanges,
    WatchEvent,
)
from qmq_coordination.subjects import (
    EVERY,
    DeliverySettings,
    PauseKind,
    PauseRecord,
    SettingsRecord,
    Whom,
    pair_of,
    pause_key,
    settings_key,
    subject_key,
    whom_of,
)
from qmq_coordination.view import Picture

from qmq import limits
from qmq.errors import InvalidArgument, InvalidName
from qmq.model import GroupSettings

SUBJECTS, GROUPS, NAMES = ("s", "t", EVERY), ("g", "h"), ("x", "y")
RECORDS = st.builds(
    SettingsRecord,
    st.none() | st.integers(0, limits.ATTEMPTS_MAX),
    st.none() | st.lists(st.integers(0, limits.REQUEUE_MS_MAX), min_size=1, max_size=5).map(tuple),
)
WHOM = st.one_of(
    st.tuples(
        st.just(PauseKind.GROUP), st.sampled_from(SUBJECTS), st.sampled_from(GROUPS), st.just("")
    ),
    st.tuples(
        st.just(PauseKind.CONSUMER),
        st.sampled_from(SUBJECTS),
        st.sampled_from(GROUPS),
        st.sampled_from(NAMES),
    ),
    st.tuples(st.just(PauseKind.CLIENT), st.just(""), st.just(""), st.sampled_from(NAMES)),
).map(lambda parts: Whom(*parts))


def item(key: str, value: bytes, revision: int = 2) -> KeyValue:
    return KeyValue(key, value, 2, revision, 1)


# --- keys and values ------------------------------------------------------------------------------


@given(RECORDS, st.integers(0, 2**53), st.text(max_size=50))
def test_records_come_back_as_they_went(record: SettingsRecord, since_ms: int, reason: str) -> None:
    assert SettingsRecord.decode(record.encode()) == record
    assert PauseRecord.decode(PauseRecord(since_ms, reason).encode()) == PauseRecord(
        since_ms, reason
    )


@given(WHOM)
def test_a_pause_is_found_under_its_key_again(whom: Whom) -> None:
    assert whom_of(pause_key(whom)) == whom


def test_settings_are_found_under_their_key_again() -> None:
    for subject in ("a.b", EVERY, "%dlq%g"):
        assert pair_of(settings_key(subject, "g")) == (subject, "g")


@pytest.mark.parametrize(
    "whom",
    [
        Whom(PauseKind.GROUP, "s", "g", "x"),
        Whom(PauseKind.GROUP, "s"),
        Whom(PauseKind.GROUP, "", "g"),
        Whom(PauseKind.GROUP, "s/t", "g"),
        Whom(PauseKind.CONSUMER, "s", "g"),
        Whom(PauseKind.CONSUMER, "s", EVERY, "x"),
        Whom(PauseKind.CLIENT, "s", "", "x"),
        Whom(PauseKind.CLIENT),
        Whom(PauseKind.GROUP, "s", "g%x"),
        Whom(PauseKind.GROUP, "%dlq%", "g"),
    ],
    ids=str,
)
def test_a_pause_without_a_valid_name_is_refused(whom: Whom) -> None:
    with pytest.raises((InvalidName, InvalidArgument)):
        pause_key(whom)


# --- who is nearest -------------------------------------------------------------------------------


@given(
    st.dictionaries(st.tuples(st.sampled_from(SUBJECTS), st.sampled_from(GROUPS)), RECORDS),
    st.sampled_from(("s", "t", "u")),
)
def test_each_setting_is_the_nearest_one_that_was_set(
    records: dict[tuple[str, str], SettingsRecord], subject: str
) -> None:
    own = GroupSettings(3, (7,))
    found = DeliverySettings(records).settings(subject, "g", own)
    near = [records[where, "g"] for where in (subject, EVERY) if (where, "g") in records]
    attempts = [each.attempts_max for each in near if each.attempts_max is not None]
    delays = [each.retry_delays_ms for each in near if each.retry_delays_ms is not None]
    assert found == GroupSettings([*attempts, 3][0], [*delays, (7,)][0])


def test_a_consumer_of_a_broadcast_group_has_the_group_s_settings() -> None:
    assert (
        DeliverySettings({("s", "g"): SettingsRecord(9)})
        .settings("s", "g%x", GroupSettings())
        .attempts_max
        == 9
    )


# --- who is paused --------------------------------------------------------------------------------

ASKED = ("s", "g", "x", "box")
PAUSED = [
    (Whom(PauseKind.GROUP, "s", "g"), ASKED, True),
    (Whom(PauseKind.GROUP, EVERY, "g"), ASKED, True),
    (Whom(PauseKind.GROUP, "t", "g"), ASKED, False),
    (Whom(PauseKind.GROUP, "s", "h"), ASKED, False),
    (Whom(PauseKind.CONSUMER, "s", "g", "x"), ASKED, True),
    (Whom(PauseKind.CONSUMER, EVERY, "g", "x"), ASKED, True),
    (Whom(PauseKind.CONSUMER, "s", "g", "box"), ASKED, False),
    (Whom(PauseKind.CONSUMER, "s", "h", "x"), ASKED, False),
    (Whom(PauseKind.CLIENT, name="box"), ASKED, True),
    (Whom(PauseKind.CLIENT, name="x"), ASKED, False),
    (Whom(PauseKind.GROUP, "s", "g"), ("s", "g%x", "x", "box"), True),
    (Whom(PauseKind.CONSUMER, "s", "g", "x"), ("s", "g%x", "x", "box"), True),
    (Whom(PauseKind.CONSUMER, "s", "g", "x"), ("s", "g%y", "y", "box"), False),
    (Whom(PauseKind.CONSUMER, "s", "g", "x"), ("s", "g", "", ""), False),
    (Whom(PauseKind.GROUP, "s", "g"), ("s", "g", "", ""), True),
]


@pytest.mark.parametrize(
    ("whom", "asked", "is_paused"),
    PAUSED,
    ids=[f"{whom}-{'.'.join(asked)}" for whom, asked, _ in PAUSED],
)
def test_a_pause_holds_only_for_the_consumer_it_names(
    whom: Whom, asked: tuple[str, str, str, str], is_paused: bool
) -> None:
    assert DeliverySettings(pauses={whom: PauseRecord(1)}).is_paused(*asked) is is_paused


def test_consumers_are_not_paused_by_default() -> None:
    assert not DeliverySettings().is_paused(*ASKED)


# --- in the picture -------------------------------------------------------------------------------


def test_the_picture_tells_of_settings_and_pauses_as_they_come_and_go() -> None:
    picture, key = Picture(), pause_key(Whom(PauseKind.CLIENT, name="box"))
    listing = [
        item(settings_key("s", "g"), SettingsRecord(2).encode()),
        item(key, PauseRecord(5, "why").encode()),
    ]
    assert picture.show(KeyListing(Revision(2), tuple(listing))).delivery
    assert picture.delivery.settings("s", "g", GroupSettings()).attempts_max == 2
    assert picture.delivery.pauses == {Whom(PauseKind.CLIENT, name="box"): PauseRecord(5, "why")}
    change = picture.follow(WatchedChanges(Revision(3), (WatchEvent(key, 3, None),)))
    assert change.delivery
    assert bool(change)
    assert picture.delivery.pauses == {}
    subject = item(subject_key("s"), b'{"name": "s"}', 4)
    assert not picture.follow(
        WatchedChanges(Revision(4), (WatchEvent(subject.key, 4, subject),))
    ).delivery


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b'{"attempts_max": "5"}',
        b'{"attempts_max": true}',
        b'{"attempts_max": -1}',
        b'{"retry_delays_ms": []}',
        b'{"retry_delays_ms": 5}',
        b'{"retry_delays_ms": ["1"]}',
        b'{"retry_delays_ms": [99999999999]}',
    ],
    ids=str,
)
def test_settings_that_cannot_be_read_count_as_absent(value: bytes) -> None:
    picture, key = Picture(), settings_key("s", "g")
    picture.show(KeyListing(Revision(2), (item(key, SettingsRecord(2).encode()),)))
    picture.follow(WatchedChanges(Revision(3), (WatchEvent(key, 3, item(key, value, 3)),)))
    assert picture.delivery.records == {}
    picture.follow(
        WatchedChanges(
            Revision(4), (WatchEvent(key, 4, item(key, b'{"attempts_max": 4, "later": 1}', 4)),)
        )
    )
    assert picture.delivery.records == {("s", "g"): SettingsRecord(4)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group/s/g", b"{"),
        ("group/s/g", b'{"reason": "no time"}'),
        ("group/s/g", b'{"since_ms": 1, "reason": 7}'),
        ("client", b"{}"),
        ("client/", b"{}"),
        ("client/a/b", b"{}"),
        ("group/s", b"{}"),
        ("group/s/g/x/y/z", b"{}"),
        ("nobody/s", b"{}"),
        ("", b"{}"),
    ],
)
def test_a_pause_that_cannot_be_read_hides_only_itself(key: str, value: bytes) -> None:
    picture, good = Picture(), Whom(PauseKind.GROUP, "t", "g")
    pauses = [item(f"/qmq/pauses/{key}", value), item(pause_key(good), PauseRecord(1).encode())]
    picture.show(KeyListing(Revision(2), tuple(pauses)))
    assert list(picture.delivery.pauses) == [good]
    picture.show(KeyListing(Revision(3), ()))
    assert picture.delivery.pauses == {}
