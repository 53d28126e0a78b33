"""Replicas that lost something: entries gone at the master, power cuts without flushes, new disks,
connections that died.
"""

from __future__ import annotations

import pytest
from qmq_replication.history import EpochRun
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import Ack, Append, LogReset, Mismatch, Promise, Refusal, Role, Timing
from replication_world import Group
from sim.world import kept_from

from qmq.errors import ProtocolViolation


def outrun(group: Group) -> None:
    """The master `a` commits with `b` what never reaches `c`, and forgets it."""
    group.elect("a")
    group.isolate("c")
    for _ in range(4):
        group.append("a", 1)
        group.settle()
    group.log["a"].forget_to(4)
    state = group.core["a"].state
    state.history = kept_from(state.history, 5)
    group.heal()


def test_a_replica_in_step_whose_next_entry_is_gone_starts_over() -> None:
    """Found by the simulator: the replica took the Reset for an old one, and both sides waited
    forever.
    """
    group = Group()
    outrun(group)
    for _ in range(3):
        group.beat()
    assert group.log["c"].start_index == 4
    assert group.core["c"].state.commit == group.core["a"].state.commit
    assert group.core["c"].state.may_count


def test_a_silent_peer_whose_next_entry_is_deleted_must_start_over() -> None:
    """Found by the simulator: the master had no entry for its heartbeat to follow, sent none, and
    so never got the reason.
    """
    group = Group(timing=Timing(inflight_bytes_max=1))
    outrun(group)
    leader = group.core["a"].leader
    assert leader is not None
    assert leader.peers["c"].next - 1 < group.core["a"].state.history.start_index
    for _ in range(5):
        group.beat()
    assert group.core["c"].state.commit == group.core["a"].state.commit


def test_an_acknowledgement_from_before_a_peer_lost_its_place_does_not_count() -> None:
    """Found by reasoning, shown by the simulator: `b` acknowledged entry 3, lost it with its power,
    was whole again, and still counted.
    """
    group = Group()
    group.elect("a")
    group.isolate("c")
    group.append("a", 2)
    group.deliver(lambda letter: letter[1] == "b")
    late = [letter for letter in group.queue if isinstance(letter[2], Ack)]
    group.queue.clear()
    del group.log["b"].epochs[1:]
    group.disk["b"] = group.disk["b"]._replace(is_whole=False)
    group.start("b")
    group.pass_time(group.timing.heartbeat_ms, "a")
    group.deliver()
    assert isinstance(group.queue[-1][2], Mismatch)
    group.deliver(lambda letter: isinstance(letter[2], Mismatch))
    group.queue = late
    group.settle()
    assert group.log["b"].epochs == [1]
    assert group.core["a"].state.commit == 1


def test_a_reset_that_comes_twice_is_done_once() -> None:
    group = Group()
    reset = LogReset(1, 1, 1, 10, 10, 12)
    group.step("b", "a", reset)
    group.step("b", "a", Append(1, 1, 1, 10, (EpochRun(1, 11),), 12, 10, False, (1, 1)))
    group.step("b", "a", reset)
    assert group.log["a"].epochs == [1, 1]


def test_an_empty_replica_begins_where_the_masters_files_begin() -> None:
    """One of the master's two logs lost its beginning and the other did not: entries after index 0
    exist, but not from byte 0 on.
    """
    group = Group()
    group.step("b", "a", Append(1, 0, 0, 0, (), 0, 0, False, None))
    assert group.core["a"].in_step
    group.step("b", "a", LogReset(1, 1, 0, 0, 5, 12))
    assert group.disk["a"].resetting_until == 12
    group.step("b", "a", Append(1, 1, 0, 0, (EpochRun(1, 1),), 12, 12, False, (1,) * 12))
    group.step("b", "a", Append(1, 1, 1, 12, (), 12, 12, False, None))
    assert group.core["a"].state.may_count


def test_an_empty_replica_learns_the_beginning_of_the_log_only_once() -> None:
    group = Group(logs={"a": (1, 1, 2), "b": (1, 1, 2)}, doubtful="c", asking="c")
    resets: list[LogReset] = []
    group.campaign("a")
    while group.queue:
        resets += [message for _, _, message in group.queue if isinstance(message, LogReset)]
        group.deliver()
    assert [(each.start_index, each.place) for each in resets] == [(0, 0)]
    for _ in range(3):
        group.beat()
    assert group.log["c"].epochs == group.log["a"].epochs
    assert group.core["c"].state.may_count


def test_a_new_groups_empty_replicas_are_not_told_to_start_over() -> None:
    group = Group()
    group.elect("a")
    assert group.log["c"].epochs == group.log["a"].epochs
    assert group.core["c"].state.may_count


def test_a_replica_with_later_entries_is_not_whole_before_it_has_those_between() -> None:
    """The replica took the message log's part from the object store, and the master has reported an
    earlier end.
    """
    group = Group()
    group.step("b", "a", LogReset(1, 1, 1, 10, 10, 12))
    group.core["a"].lacks_until(13)
    group.step("b", "a", Append(1, 1, 1, 10, (EpochRun(1, 11),), 12, 12, False, (1, 1)))
    group.step("b", "a", Append(1, 1, 1, 12, (), 12, 12, False, None))
    assert group.disk["a"].resetting_until == 13
    assert not group.core["a"].state.may_count
    group.step("b", "a", Append(1, 1, 1, 12, (EpochRun(1, 13),), 13, 13, False, (1,)))
    group.step("b", "a", Append(1, 1, 1, 13, (), 13, 13, False, None))
    assert group.core["a"].state.may_count


def test_a_reset_below_what_is_committed_is_refused() -> None:
    group = Group(logs={"a": (1, 1, 1)})
    group.step("b", "a", Append(2, 0, 1, 3, (), 3, 3, False, None))
    with pytest.raises(ProtocolViolation, match=r"entries up to 3 are committed, .* after 2"):
        group.core["a"].step(0, "c", LogReset(3, 1, 1, 2, 2, 5))


def test_a_replica_that_would_cut_what_is_committed_says_so_until_it_follows_again() -> None:
    group = Group(logs={"a": (1, 1), "b": (1,), "c": (1,)}, epoch=1)
    core = group.core["a"]
    core.on_lookup(0, 3)
    core.state.commit_to(2)
    with pytest.raises(
        ProtocolViolation,
        match=r"a knows that the entries up to 2 are committed, .* after 1: acknowledged messages",
    ):
        group.step("b", "a", Append(2, 1, 1, 1, (EpochRun(2, 2),), 2, 2, True, (2,)))
    assert core.state.history.last_index == 2
    assert "the master b of epoch 2" in core.fork
    group.step("c", "a", Append(3, 1, 1, 2, (EpochRun(3, 3),), 3, 2, True, (3,)))
    assert core.fork == ""


def test_a_log_that_is_being_rebuilt_does_not_count() -> None:
    group = Group()
    group.step("b", "a", LogReset(1, 1, 1, 10, 10, 12))
    assert group.disk["a"].resetting_until == 12
    assert not group.core["a"].state.may_count
    group.step("b", "a", Append(1, 1, 1, 10, (EpochRun(1, 11),), 11, 10, False, (1,)))
    assert not group.core["a"].state.may_count
    group.step("b", "a", Append(1, 1, 1, 11, (EpochRun(1, 12),), 12, 10, False, (1,)))
    assert group.core["a"].state.may_count


def test_a_replica_is_whole_again_only_by_what_this_epoch_has_committed() -> None:
    """An older commit may be below what it acknowledged to an earlier master."""
    group = Group(doubtful="a", logs={"a": (1, 1)})
    group.step("b", "a", Append(2, 0, 1, 2, (), 2, 2, False, None))
    assert not group.core["a"].state.may_count
    group.step("b", "a", Append(2, 0, 1, 2, (EpochRun(2, 3),), 3, 2, False, (2,)))
    group.step("b", "a", Append(2, 0, 2, 3, (), 3, 3, False, None))
    assert group.core["a"].state.may_count
    assert group.disk["a"].is_whole


def test_a_promise_of_a_replica_in_doubt_has_no_weight() -> None:
    group = Group(logs={"a": (1,), "b": (), "c": (1, 1)})
    group.campaign("a")
    group.step("b", "a", Promise(group.epoch, 0, 0, False))
    assert group.core["a"].state.role is Role.FENCING


def test_a_replica_whose_folder_may_be_an_older_copy_has_no_vote_until_it_is_known() -> None:
    group = Group()
    group.core["b"].withhold_vote()
    group.isolate("c")
    group.elect("a")
    assert not group.master
    group.core["b"].vouch()
    group.pass_time(group.timing.fence_ms)
    group.settle()
    group.elect("a")
    assert group.master == "a"


def test_an_older_copy_follows_no_master_older_than_what_it_may_have_promised() -> None:
    group = Group()
    group.elect("a")
    assert group.core["b"].state.promised == 1
    group.core["b"].doubt(group.now_ms, 2)
    group.carry_out("b")
    assert group.disk["b"] == (2, False, 0)
    assert group.step("a", "b", Append(1, 1, 1, 1, (), 1, 1, False, ())) == [Refusal(2)]


def test_when_everybody_has_promised_the_most_advanced_leads_in_doubt_or_not() -> None:
    group = Group(doubtful="abc", logs={"a": (1,), "b": (1, 1), "c": ()})
    group.pass_time(10_000, "a")
    group.settle()
    assert group.master == ""
    group.pass_time(10_000, "b")
    group.settle()
    assert group.master == "b"
    assert group.core["b"].state.may_count


def test_a_replica_in_doubt_does_not_take_over_when_asked() -> None:
    group = Group(doubtful="b")
    group.elect("a")
    group.core["b"].state.is_whole = False
    leader = group.core["a"].leader
    assert leader is not None
    leader.transfer("b")
    group.carry_out("a")
    group.settle()
    assert group.master == "a"


def test_a_slave_whose_connection_to_the_master_ends_asks_around_soon() -> None:
    group = Group()
    group.elect("a")
    group.core["b"].disconnected(group.now_ms, "a")
    assert group.core["b"].due_ms - group.now_ms <= group.timing.lost_ms * 1.3


def test_a_master_that_the_store_forgot_but_that_is_heard_is_left_alone() -> None:
    group = Group()
    group.elect("a")
    group.core["b"].master_gone(group.now_ms)
    assert group.core["b"].due_ms - group.now_ms >= group.timing.suspect_ms


def test_ticks_are_needed_no_earlier_than_the_core_says() -> None:
    group = Group()
    group.elect("a")
    for _ in range(200):
        name = min(group.core, key=lambda each: group.core[each].due_ms)
        due_ms = group.core[name].due_ms
        for each in group.core:
            group.pass_time(max(due_ms - 1 - group.now_ms, 0), each)
        assert not group.queue
        group.pass_time(due_ms - group.now_ms, name)
        group.settle()
    assert group.master == "a"


def test_a_replica_that_knows_a_newer_membership_than_the_store_does_not_lead() -> None:
    """Its majority is another one: an election under the older membership misses what the newer
    one's majority has.
    """
    group = Group()
    core = group.core["a"]
    newer = ReplicaMembership(core.state.membership.version + 3, ("a", "b", "d"), ())
    core.on_lookup(0, 0, newer)
    group.campaign("a")
    assert core.state.membership == newer
    assert core.state.role is Role.SLAVE
    core.on_lookup(0, 0, group.membership)
    epoch = group.epoch
    for _ in range(100):
        group.pass_time(100, "a")
        group.settle()
    assert core.state.role is not Role.MASTER
    assert group.epoch == epoch


def test_a_group_that_could_not_fence_does_not_campaign() -> None:
    """One replica away, one in doubt: the store must show that there is no master, and not one that
    comes and goes.
    """
    group = Group()
    group.elect("a")
    group.append("a", 1)
    group.settle()
    group.isolate("c")
    group.disk["b"] = group.disk["b"]._replace(is_whole=False)
    group.start("b")
    group.start("a")
    epoch = group.epoch
    for _ in range(200):
        group.pass_time(100, *"ab")
        group.settle()
    assert group.epoch == epoch
    group.heal()
    for _ in range(200):
        group.pass_time(100)
        group.settle()
    assert Role.MASTER in {each.state.role for each in group.core.values()}
