"""Which refusals each sender sends again under the same number, and how long it rests: the table of
qmq/delivery/retries.py.
"""

from __future__ import annotations

import pytest

from qmq.delivery.retries import DELAY_SERVER, ORDERED_SINK, PAUSE_S_MAX, PRODUCER, SINK, RetryRules
from qmq.errors import (
    CorruptBatch,
    InvalidArgument,
    MessageTooLarge,
    NotMaster,
    NumberTaken,
    Overloaded,
    QmqError,
    UnknownSubject,
)

EVERYBODY = [PRODUCER, DELAY_SERVER, SINK, ORDERED_SINK]


@pytest.mark.parametrize("rules", EVERYBODY)
@pytest.mark.parametrize("is_certain", [True, False])
@pytest.mark.parametrize(
    "failure", [Overloaded("x"), NotMaster("x"), CorruptBatch("x"), UnknownSubject("x")]
)
def test_every_sender_retries_what_may_succeed_later(
    rules: RetryRules, is_certain: bool, failure: QmqError
) -> None:
    assert rules.is_retried(failure, is_certain)


@pytest.mark.parametrize("rules", EVERYBODY)
@pytest.mark.parametrize("failure", [InvalidArgument("x"), MessageTooLarge("x")])
def test_no_sender_retries_a_batch_at_fault_that_is_not_stored(
    rules: RetryRules, failure: QmqError
) -> None:
    assert not rules.is_retried(failure, True)


def test_the_delay_server_keeps_what_may_be_stored_until_it_can_never_be() -> None:
    assert DELAY_SERVER.is_retried(MessageTooLarge("x"), False)
    assert not DELAY_SERVER.is_retried(InvalidArgument("x"), False)
    assert not PRODUCER.is_retried(MessageTooLarge("x"), False)


def test_only_the_ordered_sink_comes_back_after_a_number_was_taken() -> None:
    assert [rules.is_retried(NumberTaken("x"), True) for rules in EVERYBODY] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("rules", EVERYBODY)
def test_rests_are_short_where_a_broker_is_only_busy(rules: RetryRules) -> None:
    assert max(rules.backoff_s(number, Overloaded("x")) for number in range(1, 50)) < 2


def test_the_delay_server_rests_half_a_minute_where_people_must_act() -> None:
    rests = [DELAY_SERVER.backoff_s(number, UnknownSubject("x")) for number in range(1, 50)]
    assert rests[19] > PAUSE_S_MAX / 2
    assert max(rests) <= PAUSE_S_MAX
