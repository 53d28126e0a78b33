"""The core against the sentences of the Raft paper (Ongaro and Ousterhout, extended version) and of
Ongaro's dissertation.
"""

from __future__ import annotations

import pytest
from qmq_replication.history import EpochRun
from qmq_replication.ready import (
    Ack,
    Append,
    Campaign,
    Mismatch,
    Probe,
    ProbeReply,
    Promise,
    PromiseRequest,
    Refusal,
    Resign,
    Role,
    TakeOver,
)
from replication_world import Group

from qmq.errors import ProtocolViolation


def heartbeat(
    epoch: int,
    prev_epoch: int,
    prev_index: int,
    *,
    commit: int = 0,
    cut: bool = False,
    round: int = 0,
) -> Append:
    return Append(epoch, round, prev_epoch, prev_index, (), prev_index, commit, cut, None)


def entries(epoch: int, prev_epoch: int, prev_index: int, *epochs: int, commit: int = 0) -> Append:
    last = prev_index + len(epochs)
    return Append(
        epoch,
        0,
        prev_epoch,
        prev_index,
        (EpochRun(epochs[0], prev_index + 1),),
        last,
        commit,
        False,
        epochs,
    )


# --- section 5.1: epochs --------------------------------------------------------------------------


@pytest.mark.parametrize("message", [PromiseRequest(4), heartbeat(4, 0, 0), entries(4, 0, 0, 4)])
def test_an_older_epoch_is_refused_with_the_promised_one(message: Append) -> None:
    group = Group(epoch=5)
    assert group.step("b", "a", message) == [Refusal(5)]
    assert group.log["a"].epochs == []


def test_a_promise_is_on_disk_before_anybody_hears_of_it() -> None:
    group = Group()
    group.core["a"].step(0, "b", PromiseRequest(3))
    ready = group.core["a"].take()
    assert ready.save is not None
    assert ready.save.promised == 3
    assert ready.messages == [("b", Promise(3, 0, 0, True))]


def test_a_promise_survives_a_restart() -> None:
    group = Group()
    group.step("b", "a", PromiseRequest(3))
    group.start("a")
    assert group.step("c", "a", heartbeat(2, 0, 0)) == [Refusal(3)]


@pytest.mark.parametrize("message", [PromiseRequest(9), heartbeat(9, 0, 0), Refusal(9)])
def test_a_master_that_learns_of_a_higher_epoch_is_a_slave(message: Append) -> None:
    group = Group()
    group.elect("a")
    group.step("b", "a", message)
    assert group.core["a"].state.role is Role.SLAVE
    assert group.core["a"].leader is None


def test_a_claim_to_another_masters_epoch_is_refused() -> None:
    group = Group()
    group.elect("a")
    for name in "ac":
        with pytest.raises(ProtocolViolation, match="b claims to lead in epoch 1, which is a's"):
            group.core[name].step(0, "b", heartbeat(1, 0, 0))
    assert group.master == "a"


# --- section 5.2 and dissertation 9.6: elections --------------------------------------------------


def test_a_slave_that_hears_its_master_does_not_campaign() -> None:
    group = Group()
    group.elect("a")
    for _ in range(50):
        group.beat()
    group.pass_time(0)
    assert not group.queue


def test_a_slave_that_hears_no_master_asks_around_before_it_campaigns() -> None:
    group = Group()
    group.pass_time(10_000, "a")
    assert group.queue == [("a", "b", Probe(0)), ("a", "c", Probe(0))]
    assert not group.requests
    group.deliver()
    group.deliver()
    assert group.requests == [("a", Campaign())]


def test_a_replica_that_was_cut_off_does_not_disturb_the_others() -> None:
    """Dissertation, 9.6: without the poll it would come back with a higher epoch and depose a
    healthy master.
    """
    group = Group()
    group.elect("a")
    group.isolate("c")
    for _ in range(100):
        group.beat()
        group.pass_time(0, "c")
    group.heal()
    group.beat()
    assert group.master == "a"
    assert group.epoch == 1
    assert group.core["c"].state.promised == 1


def test_a_master_that_hears_of_no_majority_steps_down() -> None:
    group = Group()
    group.elect("a")
    group.isolate("a")
    group.pass_time(group.timing.quorum_ms + 1, "a")
    assert group.core["a"].state.role is Role.SLAVE


@pytest.mark.parametrize(("names", "enough"), [("abc", 1), ("abcd", 2), ("abcde", 2)])
def test_a_master_leads_with_promises_of_a_majority_and_no_fewer(names: str, enough: int) -> None:
    group = Group(names)
    group.campaign("a")
    for count, name in enumerate(names[1 : enough + 1], 1):
        assert group.core["a"].state.role is Role.FENCING
        group.core["a"].step(0, name, Promise(1, 0, 0, True))
        group.carry_out("a")
        assert (group.core["a"].state.role is Role.MASTER) == (count == enough)


def test_promises_of_learners_do_not_count() -> None:
    group = Group("abcxy", voters="abc")
    group.campaign("a")
    for name in "xy":
        group.step(name, "a", Promise(1, 0, 0, True))
    assert group.core["a"].state.role is Role.FENCING


def test_a_promise_for_another_epoch_does_not_count() -> None:
    group = Group(epoch=3)
    group.campaign("a")
    group.step("b", "a", Promise(3, 0, 0, True))
    assert group.core["a"].state.role is Role.FENCING


def test_a_replica_that_is_behind_lets_another_one_go_first() -> None:
    group = Group(logs={"a": (1,), "b": (1, 1)})
    group.pass_time(10_000, "a")
    group.deliver()
    group.deliver()
    assert group.core["a"].state.role is Role.SLAVE
    assert not group.requests


@pytest.mark.parametrize("ahead", [(1, 1, 1), (2,)])
def test_a_winner_that_is_behind_hands_the_mastership_over(ahead: tuple[int, ...]) -> None:
    """Section 5.4.1: the later epoch is ahead; of the same epoch, the longer log. So what is
    committed is at the master.
    """
    group = Group(logs={"a": (1, 1), "b": ahead})
    group.campaign("a")
    answers = group.step("b", "a", Promise(group.epoch, ahead[-1], len(ahead), True))
    assert answers == [TakeOver(group.epoch)]
    assert ("a", Resign(group.epoch)) in group.requests
    group.elect("b")
    assert group.master == "b"
    assert group.log["a"].epochs == group.log["b"].epochs


def test_an_epoch_that_was_won_too_late_is_given_back() -> None:
    group = Group()
    core = group.core["a"]
    core.step(0, "a", TakeOver(0))
    group.carry_out("a")
    group.step("b", "a", PromiseRequest(7))
    core.campaign_won(0, 6, group.membership)
    assert core.take().requests[-1] == Resign(6)
    assert core.state.role is Role.SLAVE


def test_a_campaign_whose_epoch_is_not_above_the_promised_one_ends() -> None:
    """Otherwise the campaign would wait forever: only its answer ends it."""
    group = Group(epoch=9)
    core = group.core["a"]
    core.step(0, "a", TakeOver(9))
    core.campaign_won(0, 8, group.membership)
    assert core.state.role is Role.SLAVE


# --- section 5.3: the log -------------------------------------------------------------------------


def test_entries_are_taken_where_the_log_continues_and_nowhere_else() -> None:
    group = Group(logs={"a": (1, 1, 2)})
    (answer,) = group.step("b", "a", entries(3, 3, 4, 3))
    assert isinstance(answer, Mismatch)
    assert (answer.last_index, answer.runs) == (3, (EpochRun(1, 1), EpochRun(2, 3)))
    group.step("b", "a", entries(3, 2, 3, 3))
    assert group.log["a"].epochs == [1, 1, 2, 3]


def test_what_the_master_does_not_have_is_cut_and_replaced_in_one_question() -> None:
    """The paper's figure 7: the slaves (a) to (f) with the leader of term 8; each is in step after
    one Mismatch at most.
    """
    leader = (1, 1, 1, 4, 4, 5, 5, 6, 6, 6)
    slaves = {
        "b": leader[:9],
        "c": leader[:4],
        "d": (*leader, 6),
        "e": (*leader, 7, 7),
        "f": (1, 1, 1, 4, 4, 4, 4),
        "g": (1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3),
    }
    group = Group("abcdefg", logs={"a": leader, **slaves}, epoch=7)
    group.campaign("a")
    for name in "bcg":  # a majority, none ahead
        group.step(name, "a", Promise(8, 0, 0, True))
    group.queue = [each for each in group.queue if not isinstance(each[2], PromiseRequest)]
    group.beat()
    for name in slaves:
        assert group.log[name].epochs == [*leader, 8], name
        leader_side = group.core["a"].leader
        assert leader_side is not None
        assert leader_side.peers[name].round <= 1


def test_a_late_heartbeat_cuts_no_entries() -> None:
    group = Group()
    group.elect("a")
    group.append("a", 3)
    group.settle()
    group.step("a", "b", heartbeat(1, 0, 0))
    group.step("a", "b", heartbeat(1, 1, 1, cut=True))
    assert group.log["b"].epochs == [1, 1, 1, 1]


def test_committed_entries_are_never_cut() -> None:
    group = Group(logs={"a": (1, 1, 1)})
    group.step("b", "a", heartbeat(2, 1, 3, commit=2))
    group.step("c", "a", PromiseRequest(3))
    with pytest.raises(ProtocolViolation, match="entries up to 2 are committed"):
        group.core["a"].step(0, "c", heartbeat(3, 1, 1, cut=True))


def test_an_acknowledgement_names_only_stored_entries() -> None:
    group = Group()
    group.flushes["a"] = False
    assert group.step("b", "a", entries(1, 0, 0, 1, 1)) == []
    (answer,) = group.step("b", "a", heartbeat(1, 1, 2))
    assert isinstance(answer, Ack)
    assert (answer.stored, answer.last_index) == (0, 2)
    group.core["a"].stored(2)
    assert group.core["a"].state.ready.messages == [("b", Ack(1, 0, 2, 2, 2))]


def test_a_flush_before_a_cut_does_not_count_for_later_entries() -> None:
    group = Group(logs={"a": (1, 1, 1)})
    group.flushes["a"] = False
    group.step("b", "a", heartbeat(2, 1, 1, cut=True))
    group.step("b", "a", entries(2, 1, 1, 2, 2))
    assert group.core["a"].state.stored_index == 1


def test_the_commit_position_never_goes_back() -> None:
    group = Group(logs={"a": (1, 1, 1)})
    group.step("b", "a", heartbeat(2, 1, 3, commit=3))
    group.step("b", "a", heartbeat(2, 1, 3, commit=1))
    assert group.core["a"].state.commit == 3


def test_a_slave_commits_no_further_than_its_log_is_known_to_match() -> None:
    group = Group(logs={"a": (1, 1, 1)})
    group.step("b", "a", heartbeat(2, 2, 9, commit=9))
    assert group.core["a"].state.commit == 0


# --- section 5.4.2: committing --------------------------------------------------------------------


def test_an_entry_is_committed_when_a_majority_stored_it() -> None:
    group = Group("abcde")
    group.elect("a")
    for name in "cde":
        group.isolate(name)
    group.append("a", 1)
    group.settle()
    assert group.core["a"].state.commit == 1
    group.heal()
    group.beat()
    assert group.core["a"].state.commit == 2


def test_the_master_s_own_copy_counts_only_once_it_is_stored() -> None:
    group = Group("abc")
    group.elect("a")
    group.flushes["a"] = False
    group.isolate("c")
    group.append("a", 1)
    group.settle()
    assert group.core["a"].state.commit == 1
    group.core["a"].stored(2)
    assert group.core["a"].state.commit == 2


def test_figure_8_an_older_epoch_s_entries_are_not_committed_by_counting() -> None:
    """(c) of the figure: S1 leads in epoch 4 and has brought its entry of epoch 2 to a majority; S5
    may still replace it.
    """
    group = Group(
        "abcde", logs={"a": (1, 2), "b": (1, 2), "c": (1,), "d": (1,), "e": (1, 3)}, epoch=3
    )
    group.campaign("a")
    for name in "bc":
        group.step(name, "a", Promise(4, 1, 1, True))
    for name in "bc":  # entry 2, of epoch 2, is on a majority; the barrier, 3, is only here
        group.step(name, "a", Ack(4, 0, 2, 2, 2))
    assert group.core["a"].state.commit == 0
    for name in "bc":  # (e): with one of its own epoch all before it is committed
        group.step(name, "a", Ack(4, 0, 3, 3, 3))
    assert group.core["a"].state.commit == 3


def test_serving_begins_when_the_epoch_s_first_entry_is_committed() -> None:
    """Section 8: a new leader does not know which entries are committed before."""
    group = Group(logs=dict.fromkeys("abc", (1, 1)))
    group.campaign("a")
    group.deliver()
    group.deliver()
    leader = group.core["a"].leader
    assert leader is not None
    assert not leader.is_serving
    group.settle()
    assert leader.is_serving


def test_an_acknowledgement_of_another_epoch_does_not_count() -> None:
    group = Group(logs=dict.fromkeys("abc", (1,)), epoch=4)
    group.isolate("b")
    group.isolate("c")
    group.campaign("a")
    group.step("b", "a", Promise(5, 1, 1, True))
    group.step("b", "a", Ack(4, 0, 2, 2, 2))
    assert group.core["a"].state.commit == 0


def test_a_poll_tells_whether_a_master_is_heard() -> None:
    group = Group()
    group.elect("a")
    assert group.step("c", "b", Probe(1)) == [ProbeReply(1, "a", True, 1, 1, True)]
    group.core["b"].disconnected(group.now_ms, "a")
    assert group.step("c", "b", Probe(1)) == [ProbeReply(1, "a", False, 1, 1, True)]
