"""Redelivery decisions for failed messages, in examples."""

from __future__ import annotations

import pytest

from qmq.broker.dispatch.pull import Begun, Decided, decide, put_back
from qmq.log.group_state import HeldMessages
from qmq.model import GroupSettings
from qmq.wire.frame_payloads import BY_GROUP_MS, Settlement, Verdict

SETTINGS = GroupSettings(attempts_max=3, retry_delays_ms=(10, 20))


def none_failed(_sequence: int, count: int) -> list[tuple[int, int]]:
    return [(count, 0)]


def nack(first: int, last: int, delay_ms: int = BY_GROUP_MS, error: str = "") -> Settlement:
    return Settlement(first, last, Verdict.NACK, delay_ms, error)


def test_a_failed_message_rests_as_long_as_its_group_says_for_the_attempt() -> None:
    held = [HeldMessages(0, 100, 2, 1), HeldMessages(2, 50, 2, 2)]
    assert decide(held, [nack(0, 3)], SETTINGS, none_failed).settlements == (
        (0, 1, Verdict.NACK, 10),
        (2, 3, Verdict.NACK, 20),
    )


def test_a_handlers_own_delay_counts_before_the_groups() -> None:
    assert decide(
        [HeldMessages(0, 0, 1, 2)], [nack(0, 0, 77)], SETTINGS, none_failed
    ).settlements == ((0, 0, Verdict.NACK, 77),)


def test_the_last_attempt_that_fails_is_dead_with_its_error_and_the_others_are_not() -> None:
    held = [HeldMessages(0, 0, 3, 1), HeldMessages(3, 10, 2, 3)]
    decided = decide(held, [nack(0, 4, error="boom")], SETTINGS, none_failed)
    assert decided == Decided(((0, 2, Verdict.NACK, 10), (3, 4, Verdict.DEAD, 0)), ((1, "boom"),))


def test_without_a_limit_nothing_dies_of_failing() -> None:
    decided = decide(
        [HeldMessages(0, 0, 1, 1_000)], [nack(0, 0)], GroupSettings(0, (5,)), none_failed
    )
    assert decided.settlements == ((0, 0, Verdict.NACK, 5),)


def test_a_rejected_message_is_dead_at_its_first_attempt() -> None:
    reject = Settlement(0, 0, Verdict.DEAD, 0, "no JSON")
    decided = decide([HeldMessages(0, 0, 1, 1)], [reject], GroupSettings(0, (5,)), none_failed)
    assert decided == Decided(((0, 0, Verdict.DEAD, 0),), ((0, "no JSON"),))


def test_attempts_before_a_message_was_sent_again_count() -> None:
    def failures(sequence: int, count: int) -> list[tuple[int, int]]:
        assert (sequence, count) == (100, 3)
        return [(1, 0), (2, 2)]

    decided = decide([HeldMessages(0, 100, 3, 1)], [nack(0, 2)], SETTINGS, failures)
    assert decided.settlements == ((0, 0, Verdict.NACK, 10), (1, 2, Verdict.DEAD, 0))


def test_acknowledgements_and_releases_pass_as_they_came() -> None:
    asked = [Settlement(0, 3, Verdict.ACK, 0), Settlement(6, 7, Verdict.RELEASE, 0), nack(4, 5)]
    decided = decide([HeldMessages(0, 0, 8, 1)], asked, SETTINGS, none_failed)
    assert decided.settlements == (
        (0, 3, Verdict.ACK, 0),
        (6, 7, Verdict.RELEASE, 0),
        (4, 5, Verdict.NACK, 10),
    )


def test_a_verdict_on_a_lost_message_is_kept_so_that_the_share_reports_it_late() -> None:
    assert decide([], [nack(4, 5)], SETTINGS, none_failed).settlements == ((4, 5, Verdict.NACK, 0),)


@pytest.mark.parametrize("attempts_max", [0, 1, 3])
def test_a_message_never_dies_of_the_first_loss_of_its_consumer(attempts_max: int) -> None:
    decided = put_back(
        [HeldMessages(0, 0, 10, 1)],
        lambda _: False,
        GroupSettings(attempts_max, (10,)),
        none_failed,
    )
    assert decided.settlements == ((0, 9, Verdict.NACK, 0),)


def test_losses_age_only_the_begun_message_which_dies_at_its_last_attempt() -> None:
    begun = Begun()
    begun.add(4, 4)
    decided = put_back([HeldMessages(0, 0, 10, 3)], begun.__contains__, SETTINGS, none_failed)
    assert decided.settlements == (
        (0, 3, Verdict.RELEASE, 0),
        (4, 4, Verdict.DEAD, 0),
        (5, 9, Verdict.RELEASE, 0),
    )
    assert decided.errors == ((1, "its consumer was lost while it worked on it"),)


def test_a_begun_message_with_attempts_left_rests_before_it_comes_again() -> None:
    decided = put_back([HeldMessages(0, 0, 2, 2)], lambda pull: pull == 1, SETTINGS, none_failed)
    assert decided.settlements == ((0, 0, Verdict.RELEASE, 0), (1, 1, Verdict.NACK, 20))


def test_begun_marks_end_when_the_message_is_no_longer_held() -> None:
    begun = Begun()
    for pull in (1, 2, 3, 7):
        begun.add(pull, pull)
    assert [pull for pull in range(9) if pull in begun] == [1, 2, 3, 7]
    for pull in range(100, 300, 2):
        begun.add(pull, pull)
    begun.forget([HeldMessages(7, 0, 1, 2), HeldMessages(298, 0, 1, 2)])
    assert [pull for pull in range(300) if pull in begun] == [7, 298], (
        "one that hangs keeps nothing but itself"
    )
