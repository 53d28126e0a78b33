"""A run is a pass only if nothing is broken and everything was met; the checkers of delayed
messages report each broken rule.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from history.events import Ack, History, Operation, Poll, Record, Send

from campaign import table
from campaign.checkers.delayed import Arrive, Cancel, Later, all_arrived
from campaign.checkers.messages import all_acknowledged
from campaign.report import as_json, as_page
from campaign.values import CampaignTest, Evidence, Strike
from campaign.verdict import Result, judged

SECOND = 1_000_000_000
QUEUE = "campaign/0@g1"
GROUP = "workers"


def a_test(name: str) -> CampaignTest:
    """A test of the table with gates that a few events open."""
    found = table.tests()[name]
    workload = replace(found.workload, gates={"send": 2, "poll": 2, "ack": 2})
    return replace(found, workload=workload)


def served(value: int, at_s: int, sequence: int) -> list[Operation]:
    """A message that is sent, handed out and acknowledged."""
    at = at_s * SECOND
    send = Send(process="p", type="invoke", subject="campaign", values=(value,), t_ns=at)
    poll = Poll(process="c", type="invoke", group=GROUP, t_ns=at + 2)
    ack = Ack(process="c", type="invoke", group=GROUP, queue=QUEUE, values=(value,), t_ns=at + 4)
    return [
        send,
        replace(send, type="ok", queue=QUEUE, sequence=sequence, t_ns=at + 1),
        poll,
        replace(poll, type="ok", queue=QUEUE, records=(Record(sequence, value),), t_ns=at + 3),
        ack,
        replace(ack, type="ok", t_ns=at + 5),
    ]


def struck(at_s: int, *, effect: str = "dead: g1-a", end: str = "ok") -> list[Operation]:
    begun = Strike(process="nemesis", type="invoke", fault="kill-master", t_ns=at_s * SECOND)
    seen = replace(begun, type="info", effect=effect, targets=("g1-a",), t_ns=begun.t_ns + 1)
    healed = replace(seen, type=end, t_ns=begun.t_ns + SECOND)  # type: ignore[arg-type]
    return [begun, seen, healed]


def verdict_on(
    events: list[Operation], name: str = "queue-kill-master", *, drained: bool = True
) -> Result:
    in_order = sorted(events, key=lambda each: each.t_ns)
    return judged(a_test(name), in_order, table.checkers(), is_drained=drained, seed=1, seconds=1.0)


WHOLE = [*served(1, 1, 0), *struck(2), *served(2, 5, 1)]


def test_a_run_in_which_everything_was_met_and_nothing_broken_passes() -> None:
    found = verdict_on(WHOLE)
    assert (found.verdict, found.unmet) == ("pass", [])
    assert found.strikes == {"kill-master": 1}


@pytest.mark.parametrize(
    ("events", "gate"),
    [
        ([*served(1, 1, 0), *served(2, 5, 1)], "never met"),
        ([*served(1, 1, 0), *struck(2, effect=""), *served(2, 5, 1)], "never met"),
        ([*served(1, 1, 0), *struck(2, end="fail"), *served(2, 5, 1)], "not healed"),
        ([*served(1, 1, 0), *served(2, 2, 1), *struck(5)], "after the last fault"),
        ([*served(1, 1, 0), *struck(2)], "answered"),
    ],
)
def test_a_run_that_shows_too_little_is_no_pass(events: list[Operation], gate: str) -> None:
    found = verdict_on(events)
    assert found.verdict == "no proof"
    assert any(gate in each for each in found.unmet)


def test_a_run_whose_readers_missed_something_is_no_pass() -> None:
    assert verdict_on(WHOLE, drained=False).verdict == "no proof"


def test_a_lost_message_fails_the_run_and_is_named() -> None:
    lost = [each for each in served(3, 6, 2) if isinstance(each, Send)]
    found = verdict_on([*WHOLE, *lost])
    assert found.verdict == "fail"
    assert found.found == {"no_loss": 1}


@pytest.mark.parametrize(
    ("at_s", "name", "verdict"),
    [
        (4, "queue-power-all", "pass"),
        (4, "queue-power-all-sync", "fail"),
        (1, "queue-power-all", "fail"),
    ],
)
def test_only_the_last_messages_before_a_cut_may_be_lost_and_only_unflushed(
    at_s: int, name: str, verdict: str
) -> None:
    """The cut is at 4.5 s."""
    cut = [replace(each, t_ns=each.t_ns + SECOND // 2) for each in struck(4)]
    lost = [each for each in served(9, at_s, 7) if isinstance(each, Send)]
    found = verdict_on([*served(1, 2, 0), *cut, *served(2, 8, 1), *lost], name)
    assert found.verdict == verdict
    assert found.doubtful == (verdict == "pass")


def test_a_strike_that_slows_disks_first_leaves_only_what_no_sync_took_in_doubt() -> None:
    """It begins at 4.5 s; the last syncs begin at 8.5 s."""
    begun, seen, healed = [
        replace(each, fault="power-all-slow", t_ns=each.t_ns + SECOND // 2)
        for each in struck(4)
        if isinstance(each, Strike)
    ]
    seen = replace(seen, unsynced_ns=8 * SECOND + SECOND // 2, t_ns=10 * SECOND)
    cut = [begun, seen, replace(healed, t_ns=11 * SECOND)]
    for at_s, verdict in ((6, "fail"), (8, "pass")):
        lost = [each for each in served(9, at_s, 7) if isinstance(each, Send)]
        events = [*served(1, 2, 0), *cut, *served(2, 12, 1), *lost]
        assert verdict_on(events, "queue-power-all-slow").verdict == verdict


def test_what_a_dead_client_was_acknowledging_may_be_settled() -> None:
    drained, got = all_acknowledged((GROUP,)), served(1, 1, 0)[:-1]
    assert not drained(got), "its acknowledgement is under way"
    first = [replace(each, process="worker0.1") if each.process == "c" else each for each in got]
    again = Poll(process="worker0.2", type="invoke", group=GROUP, t_ns=3 * SECOND)
    assert drained([*first, again])
    unknown = [*got, replace(served(1, 1, 0)[-1], type="info")]
    assert drained(unknown)
    assert not drained([*got, replace(served(1, 1, 0)[-1], type="fail")])


def delayed(*events: Operation) -> dict[str, int]:
    """What the checkers of delayed messages find."""
    evidence = Evidence(history=History(events), is_drained=True)  # type: ignore[arg-type]
    names = table.workloads()["delayed"].checkers
    found = {name: len(list(table.checkers()[name].find(evidence))) for name in names}
    return {name: count for name, count in found.items() if count}


SENT = [
    Later(process="p", type="invoke", values=(7,), due_ms=(5_000,)),
    Later(process="p", type="ok", values=(7,), due_ms=(5_000,)),
]
CANCEL = Cancel(process="p", type="ok", value=7)
CAME = Arrive(process="c", type="ok", value=7, queue=QUEUE, sequence=1, stored_ms=5_100)


def test_a_delayed_message_comes_once_and_in_time_or_is_cancelled() -> None:
    assert delayed(*SENT, CAME) == {}
    assert delayed(*SENT, CAME, CAME) == {}
    assert delayed(*SENT, CANCEL) == {}
    assert all_arrived([*SENT, CAME])
    assert not all_arrived(SENT)


def test_each_rule_of_delayed_messages_is_checked() -> None:
    assert delayed(*SENT) == {"due_comes": 1}
    assert delayed(*SENT, replace(CAME, stored_ms=4_999)) == {"never_early": 1}
    assert delayed(*SENT, CAME, replace(CAME, sequence=2)) == {"due_once": 1}
    assert delayed(*SENT, CANCEL, CAME) == {"cancelled_or_delivered": 1}
    assert delayed(CAME) == {"due_no_phantom": 1}
    assert delayed(SENT[0], replace(SENT[1], type="fail"), CAME) == {"due_no_phantom": 1}


def test_a_report_says_what_was_never_met() -> None:
    results = [verdict_on(WHOLE), replace(verdict_on(WHOLE), test="queue-stop-all", strikes={})]
    tests = table.tests()
    found = json.loads(json.dumps(as_json(tests, results)))
    assert found["never met"]["faults"] == ["stop-all"]
    assert found["tests"][0]["strikes"] == {"kill-master": 1}
    assert "stop-all" in as_page(tests, results)
