"""The checkers are tested before anything is tested by them: a table of small histories, each with
exactly what is wrong in it.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from history.cases import (
    BAD,
    GOOD,
    Case,
    answered_nowhere,
    done,
    got,
    refused,
    sent,
    tried,
    unknown,
)
from history.checkers import (
    Gap,
    availability,
    check_all,
    delivered_twice,
    deliveries,
    lost,
    lost_below,
    recovered,
)
from history.events import Event, History, Poll, Record, Send
from support import forms


@pytest.mark.parametrize("case", GOOD + BAD, ids=lambda case: case.name)
def test_a_history_shows_exactly_its_anomalies(case: Case) -> None:
    report = check_all(case.events, drained=case.drained, groups=case.groups)
    assert sorted(report.names.elements()) == sorted(case.wrong.split()), str(report)
    assert report.ok == (not case.wrong)


def test_the_table_is_large_enough_and_half_of_it_is_bad() -> None:
    assert len(GOOD) + len(BAD) >= 40
    assert len(BAD) >= len(GOOD)
    assert len({case.name for case in GOOD + BAD}) == len(GOOD + BAD)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_evidence_alone_proves_the_anomaly(case: Case) -> None:
    """The evidence is part of the history and in its order of telling: short enough to be read."""
    for anomaly in check_all(case.events, drained=case.drained, groups=case.groups).anomalies:
        assert 1 <= len(anomaly.evidence) <= 3
        assert all(event in case.events for event in anomaly.evidence)
        assert str(anomaly).count("\n") == len(anomaly.evidence)


def test_slack_excuses_what_was_passed_over_lately() -> None:
    events = [replace(event, t_ns=100) for event in sent(1, 2, at=0) + got((1, 2))]
    later = History([*events, replace(tried(3)[0], t_ns=150)])
    assert [found.name for found in lost_below(later)] == ["lost_below"]
    assert [found.name for found in lost_below(later, slack_ns=50)] == ["lost_below"]
    assert lost_below(later, slack_ns=51) == []


def test_lost_says_nothing_about_a_history_that_was_not_drained() -> None:
    assert lost(History(sent(1, at=0)), drained=False) == []


def test_deliveries_are_counted_for_each_group() -> None:
    history = History(
        sent(1, 2, at=0)
        + got((0, 1), (1, 2))
        + got((0, 1, 2), by="c2")
        + got((0, 1), by="d1", group="audit")
    )
    assert (deliveries(history), delivered_twice(history)) == (4, 1)


def test_values_stored_without_an_answer_are_recovered() -> None:
    assert (
        recovered(
            History(
                unknown(1) + tried(2) + unknown(3) + sent(4, at=2) + got((0, 1), (1, 2), (2, 4))
            )
        )
        == 2
    )


def test_one_poll_may_be_answered_from_several_queues() -> None:
    """All answers began where the poll began: before the acknowledgement."""
    begun, first = got((0, 1), by="c2")
    assert check_all([*sent(1, at=0), *got((0, 1)), begun, first, *done(1), first], drained=True).ok
    assert not check_all([*sent(1, at=0), *got((0, 1)), *done(1), begun, first], drained=True).ok


def test_operations_with_numbers_may_overlap_in_one_process() -> None:
    """Poll 1 began before the acknowledgement and may show the message; poll 2 began after it and
    may not.
    """
    numbered = {op: [replace(event, op=op) for event in got((0, 1, 2))] for op in (1, 2)}
    before, after = numbered[1], numbered[2]
    events: list[Event] = [*sent(1, at=0), *got((0, 1)), before[0], *done(1), after[0], before[1]]
    assert check_all(events, drained=True).ok
    assert check_all([*events[:-1], after[1]], drained=True).names == {"delivered_after_ack": 1}


def test_gaps_begin_at_the_first_attempt_and_end_at_the_last() -> None:
    begun, answered = sent(1, at=0)
    moments = [(begun, 10), (answered, 15), (answered, 19), (answered, 40), (begun, 43)]
    history = History(replace(event, t_ns=t_ns) for event, t_ns in moments)
    assert availability(history) == [Gap(21, 19), Gap(5, 10), Gap(4, 15), Gap(3, 40)]
    assert availability(history, longest=1) == [Gap(21, 19)]
    assert availability(History([])) == []


def test_a_broker_that_never_answers_is_one_long_gap() -> None:
    history = History(
        replace(event, t_ns=t_ns)
        for event, t_ns in zip(unknown(1) + unknown(2), (5, 6, 7, 105), strict=True)
    )
    assert availability(history) == [Gap(100, 5)]


def test_the_report_counts_values() -> None:
    events = (
        sent(1, 2, at=0)
        + unknown(3)
        + tried(4)
        + refused(5)
        + got((0, 1), (1, 2), (2, 3))
        + got((0, 1, 2))
    )
    counts = check_all(events, drained=True).counts
    assert counts == {
        "sent": 5,
        "acked": 2,
        "unknown": 2,
        "failed": 1,
        "polled": 3,
        "deliveries": 4,
        "delivered_twice": 1,
        "recovered": 1,
        "unseen": 0,
    }


def test_a_value_is_counted_once_by_its_best_attempt() -> None:
    counts = check_all(
        refused(1) + unknown(1) + refused(2) + sent(2, at=0) + refused(3) + refused(3),
        drained=False,
    ).counts
    assert (counts["sent"], counts["acked"], counts["unknown"], counts["failed"]) == (3, 1, 1, 1)


def test_the_report_is_json_and_text_and_stays_short() -> None:
    report = check_all(
        [event for value in range(100) for event in sent(value, at=value)], drained=True
    )
    told = json.loads(json.dumps(report.to_json(shown_max=3)))
    assert told["found"] == {"lost": 100}
    assert len(told["anomalies"]) == 3
    assert told["acked"] == 100
    assert str(report).startswith("lost 100 (drained)\nsent 100, acked 100")
    assert str(report).count("lost: ") == 10


def test_a_clean_report_says_so() -> None:
    report = check_all(sent(1, at=0) + got((0, 1)), drained=True)
    assert str(report).startswith("no anomaly (drained)")
    assert report.to_json()["ok"] is True


def test_an_answer_that_does_not_say_where_is_refused() -> None:
    with pytest.raises(ValueError, match="must say where"):
        check_all(answered_nowhere(), drained=True)
    with pytest.raises(ValueError, match="must say from where"):
        check_all(
            [Poll(process="c1", type="ok", group="billing", records=(Record(0, 1),))], drained=True
        )


@pytest.mark.longest
@pytest.mark.sampled
def test_a_history_of_many_values_is_judged_in_linear_time() -> None:
    """Anything quadratic would run into the timeout: 50,000 values in the gate, else 200,000."""
    count = 50_000 if forms.FORM == "gate" else 200_000
    events: list[Event] = []
    for base in range(0, count, 100):
        events += sent(*range(base, base + 100), at=base)
        events += got(*((value, value) for value in range(base, base + 100)))
        events += done(*range(base, base + 100))
    assert check_all(events, drained=True).ok
    swapped = [
        replace(event, values=event.values[::-1]) if isinstance(event, Send) else event
        for event in events
    ]
    assert check_all(swapped, drained=True).names["inconsistent_positions"] == count
