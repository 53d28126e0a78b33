"""The outbox's pure parts: which rows next, who holds the lease, what a row holds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq import limits
from qmq.errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    UnknownSubject,
)
from qmq.model import MessageId
from qmq.sql.connection import DriverConnection, finish, prepared
from qmq.sql.dialects import DIALECTS
from qmq.sql.outbox_message import error_text, from_row, new_message
from qmq.sql.outbox_sender import SLICE_BYTES, SLICE_MESSAGES, is_final, slices
from qmq.sql.outbox_statements import OutboxStatements
from qmq.sql.outbox_tables import (
    ERROR_CHARS_MAX,
    TABLE_CHARS_MAX,
    lease_table,
    migration,
    statements,
)
from qmq.sql.outbox_turns import (
    PAUSE_S_MAX,
    HeldLease,
    LeaseRow,
    Patience,
    Step,
    WaitingRow,
    after_asking,
    choose,
    next_step,
    wait_s,
)

ROWS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.one_of(st.none(), st.integers(0, 2)),
        st.integers(0, 50),
        st.integers(-1, 1),
    ),
    max_size=30,
).map(lambda found: [WaitingRow(number, *each) for number, each in enumerate(found)])


@given(ROWS, st.integers(1, 10), st.integers(1, 100))
def test_rows_of_a_key_are_chosen_in_order_and_none_is_passed_over(
    rows: list[WaitingRow], messages_max: int, bytes_max: int
) -> None:
    chosen = choose(rows, messages_max, bytes_max)
    taken = {number for ids in chosen.values() for number in ids}
    for subject, ids in chosen.items():
        assert ids == sorted(ids)
        assert len(ids) <= messages_max
        sizes = [rows[number].size for number in ids]
        assert len(sizes) == 1 or sum(sizes) <= bytes_max
        assert {rows[number].subject for number in ids} == {subject}
    for row in rows:
        assert row.claimed_ms <= 0 or row.id not in taken
        if row.key_hash is not None and row.id in taken:
            before = [
                each
                for each in rows[: row.id]
                if (each.subject, each.key_hash) == (row.subject, row.key_hash)
            ]
            assert taken.issuperset([each.id for each in before])
    free = {row.subject for row in rows if row.claimed_ms <= 0 and row.key_hash is None}
    assert free <= set(chosen)


def test_behind_a_subject_that_is_full_nothing_is_taken_however_small() -> None:
    assert choose(
        [WaitingRow(number, "a", None, size, 0) for number, size in enumerate((2, 0, 0))], 9, 1
    ) == {"a": [0]}


def test_the_example_of_the_choice_holds() -> None:
    rows = [
        WaitingRow(1, "a", 7, 1, 900),
        WaitingRow(2, "a", 8, 1, 0),
        WaitingRow(3, "a", 7, 1, 0),
        WaitingRow(4, "b", None, 1, 0),
    ]
    assert choose(rows, 10, 100) == {"a": [2], "b": [4]}


def test_a_subject_that_fails_rests_longer_each_time_until_something_is_sent() -> None:
    patience = Patience()
    assert [patience.failed("a", 0.0) for _ in range(7)] == [
        1,
        2,
        4,
        8,
        16,
        PAUSE_S_MAX,
        PAUSE_S_MAX,
    ]
    assert patience.resting(29.0) == ["a"]
    assert patience.resting(30.0) == []
    patience.sent("a")
    assert patience.failed("a", 100.0) == 1


@given(st.integers(0, 2**32))
def test_at_most_one_of_many_watchdogs_holds_a_valid_lease_whatever_is_slow(seed: int) -> None:
    """The database's clock may be slow by 1%; requests take any time to arrive; watchdogs pause."""
    chance = random.Random(seed)
    row = LeaseRow("", 0, 0)
    until_ms, lease_s = 0.0, 3.0
    held: list[HeldLease | None] = [None] * 3
    now, drift = 0.0, chance.uniform(0.99, 1.0)

    def seen() -> LeaseRow:
        return row._replace(left_ms=int(until_ms - now * drift * 1000))

    for _ in range(300):
        now += chance.choice((0.01, 0.3, 1.0, 2.0))
        me = chance.randrange(3)
        step = next_step(held[me], seen(), now)
        asked_at = now
        now += chance.choice((0.0, 0.2, 2.0))  # the request is on its way
        database_now = now * drift * 1000
        if step is Step.TAKE:
            is_changed = until_ms <= database_now
            if is_changed:
                row, until_ms = LeaseRow(str(me), row.token + 1, 0), database_now + lease_s * 1000
            held[me] = after_asking(row.token, is_changed, asked_at, lease_s)
        elif step is Step.RENEW:
            mine = held[me]
            assert mine is not None
            is_changed = mine.token == row.token
            if is_changed:
                until_ms = database_now + lease_s * 1000
            held[me] = after_asking(mine.token, is_changed, asked_at, lease_s)
        assert sum(each is not None and each.is_held(now) for each in held) <= 1
        assert 0 <= wait_s(held[me], seen(), now, 1.0) <= lease_s


def test_a_watchdog_creates_takes_or_waits_for_the_lease_row() -> None:
    assert next_step(None, None, 0.0) is Step.CREATE
    assert next_step(None, LeaseRow("x", 4, 0), 0.0) is Step.TAKE
    assert next_step(None, LeaseRow("x", 4, 1), 0.0) is Step.WAIT
    held = HeldLease(5, 10.0, 40.0)
    assert next_step(held, None, 19.9) is Step.WORK
    assert next_step(held, None, 20.0) is Step.RENEW
    assert after_asking(5, False, 0.0, 1.0) is None


KEYS = st.binary(max_size=20)
TEXTS = st.text(min_size=1, max_size=20)


@pytest.mark.sampled
@given(
    KEYS,
    st.lists(TEXTS, max_size=3),
    st.dictionaries(TEXTS.filter(lambda name: not name.startswith("qmq-")), KEYS, max_size=3),
    KEYS,
)
def test_a_row_gives_back_the_message_that_was_put_in(
    key: bytes, tags: list[str], headers: dict[str, bytes], body: bytes
) -> None:
    message = new_message(
        MessageId(1, 2, 0), 5_000_000, "s", body, key=key, tags=tags, headers=headers
    )
    row = message.row()
    assert from_row((7, *row.values())).message == message
    assert all(value.isascii() for value in (row["tags"], row["headers"]) if value)
    assert message.size >= len(body) + len(key) + sum(map(len, tags))


def test_a_row_that_was_cut_or_cannot_be_read_says_so_and_is_not_sent() -> None:
    row: dict[str, Any] = new_message(MessageId(1, 2, 0), 0, "s", b"body", tags=["t"]).row()
    for harm in ({"body": b"bo"}, {"tags": "[tt"}, {"subject": "not a name"}, {"tags": '["t"'}):
        values = row | harm
        if "tags" in harm:
            values["content_bytes"] += len(harm["tags"]) - len(row["tags"])
        found = from_row((7, *values.values()))
        assert found.message is None
        assert found.fault is not None
        assert is_final(found.fault)


def test_wrong_arguments_are_refused_at_the_call() -> None:
    for wrong, kind in (
        ({"subject": "no name"}, InvalidName),
        ({"body": "text"}, InvalidArgument),
        ({"key": b"k" * 5_000}, MessageTooLarge),
        ({"body": bytes(limits.BODY_BYTES_MAX + 1)}, MessageTooLarge),
    ):
        with pytest.raises(kind):
            new_message(MessageId(1, 2, 0), 0, **({"subject": "s", "body": b""} | wrong))


def test_errors_are_kept_as_short_ascii() -> None:
    assert error_text(ValueError("größe\n\0")) == "gr\\xf6\\xdfe\\n\\x00"
    assert len(error_text(ValueError("x" * 99_999))) == ERROR_CHARS_MAX
    assert error_text(TimeoutError()) == "TimeoutError"


def test_only_what_the_message_is_to_blame_for_is_final() -> None:
    assert is_final(UnknownSubject("?"))
    assert is_final(MessageTooLarge("?"))
    assert not is_final(ClientClosed("?"))
    assert not is_final(DeadlineExceeded("?"))


def test_slices_keep_the_order_and_the_limits() -> None:
    small = [new_message(MessageId(1, n, 0), 0, "s", b"x") for n in range(1_201)]
    cut = list(slices(small, range(1_201)))
    assert [len(each) for each in cut] == [SLICE_MESSAGES, SLICE_MESSAGES, 201]
    assert [place for each in cut for place in each] == list(range(1_201))
    large = [new_message(MessageId(1, n, 0), 0, "s", bytes(SLICE_BYTES // 2)) for n in range(3)]
    assert list(slices(large, range(3))) == [[0], [1], [2]]
    old_and_new = [
        new_message(MessageId(1, n, 0), n * (1 << 32) * 1_000_000, "s", b"") for n in range(2)
    ]
    assert list(slices(old_and_new, range(2))) == [[0], [1]]


def test_statements_take_their_values_by_place_where_a_driver_wants_it() -> None:
    said = OutboxStatements("sqlite").claim([4, 5], 1_000)
    found = prepared(said.expression, "sqlite", "qmark")
    assert found.text.count("?") == 3
    assert ":" not in found.text
    assert found.parameters(said.values) == (1_000, 4, 5)


def test_a_list_of_any_length_has_few_forms_and_names_nothing_that_was_not_given() -> None:
    say = OutboxStatements("postgresql")
    forms = set()
    for count in range(1, 501):
        said = say.drop(range(count))
        found = prepared(said.expression, "postgresql", "format")
        forms.add(found.text)
        assert set(found.parameters(said.values)) == set(range(count))
    assert len(forms) == 10


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_table_is_named_in_statements_as_in_its_migration(dialect: str) -> None:
    said = OutboxStatements(dialect, "Shop.Outbox_7").drop([1])
    assert prepared(said.expression, dialect, "qmark").text.startswith("DELETE FROM Shop.Outbox_7 ")


def test_tables_have_names_that_no_database_cuts_and_each_dialect_its_statements() -> None:
    for dialect in DIALECTS:
        assert len(statements(dialect, "shop.outbox_7")) >= 2
        assert "shop.qmq_outbox_lease" in migration(dialect, "shop.outbox_7")
    assert lease_table("outbox_7") == "qmq_outbox_lease"
    assert migration("mariadb") == migration("mysql")
    for name in ("", "a b", "x" * (TABLE_CHARS_MAX + 1), "a.b.c", "drop;", "1a", 7):
        with pytest.raises((InvalidName, InvalidArgument)):
            migration("sqlite", name)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="oracle"):
        migration("oracle")


def test_a_coroutine_that_waits_cannot_be_finished_without_a_loop() -> None:
    class Never:
        def __await__(self):  # type: ignore[no-untyped-def]
            yield self

    async def waits() -> None:
        await Never()

    with pytest.raises(InvalidArgument, match="asyncio client"):
        finish(waits())
    with pytest.raises(InvalidArgument, match="not a connection"):
        DriverConnection(object())
