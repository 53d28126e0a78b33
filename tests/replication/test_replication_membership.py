"""Which replicas have a vote, and how that changes (Ongaro's dissertation, section 4.1)."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qmq_replication.history import EpochRun
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import Ack, Campaign, MembershipChange, Mismatch
from replication_world import Group

from qmq.errors import InvalidArgument, NoQuorum, Unavailable

NAMES = "abcdefg"


@given(st.integers(1, 7), st.dictionaries(st.sampled_from("abcdefgx"), st.integers(0, 9)))
def test_the_quorum_index_is_the_highest_that_a_majority_holds(
    voters: int, held: dict[str, int]
) -> None:
    membership = ReplicaMembership(1, tuple(NAMES[:voters]), ("x",))
    slow = max(
        index
        for index in range(10)
        if membership.is_majority(name for name in NAMES[:voters] if held.get(name, 0) >= index)
    )
    assert membership.quorum_index(held) == slow


@given(st.integers(1, 7), st.booleans())
def test_any_majority_before_a_change_meets_any_majority_after_it(
    voters: int, is_added: bool
) -> None:
    before = ReplicaMembership(1, tuple(NAMES[:voters]), ("x",))
    after = before.with_voter("x") if is_added or voters == 1 else before.without("a")
    for left in combinations(before.voters, before.majority):
        assert all(set(left) & set(right) for right in combinations(after.voters, after.majority))


def test_learners_make_no_majority() -> None:
    membership = ReplicaMembership(1, ("a", "b", "c"), ("x", "y"))
    assert not membership.is_majority(["a", "x", "y"])
    assert membership.is_majority(["a", "b", "b"])
    assert not membership.is_majority(["a", "a"])


def test_versions_follow_each_other_and_survive_encoding() -> None:
    membership = ReplicaMembership(1, ("a", "b")).with_learner("x").with_voter("x").without("a")
    assert membership == ReplicaMembership(4, ("b", "x"))
    assert ReplicaMembership.decode(membership.encode()) == membership


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda one: one.with_learner("a"), "is already a replica of this group"),
        (lambda one: one.with_voter("b"), "is not a learner"),
        (lambda one: one.without("b"), "is not a replica"),
        (lambda one: one.without("a"), "last voter"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(change: object, complaint: str) -> None:
    assert callable(change)
    with pytest.raises(InvalidArgument, match=complaint):
        change(ReplicaMembership(1, ("a",)))


# --- the master changes it ------------------------------------------------------------------------


def grown() -> Group:
    """`a` leads a, b and c; x is there, and nothing yet."""
    group = Group("abcx", voters="abc")
    group.elect("a")
    return group


def test_a_learner_that_has_caught_up_becomes_a_voter() -> None:
    group = grown()
    leader = group.core["a"].leader
    assert leader is not None
    group.append("a", 3)
    leader.propose(group.membership.with_learner("x"), group.now_ms)
    group.carry_out("a")
    group.settle()
    for _ in range(4):
        group.beat()
    assert group.core["a"].state.membership.voters == ("a", "b", "c", "x")
    assert group.log["x"].epochs == group.log["a"].epochs


def test_a_learner_that_is_always_a_little_behind_becomes_a_voter() -> None:
    """Under load its answer to the newest entry is always on its way when we look."""
    group = grown()
    leader = group.core["a"].leader
    assert leader is not None
    leader.propose(group.membership.with_learner("x"), group.now_ms)
    group.carry_out("a")
    group.settle()
    for _ in range(6):
        group.append("a", 1)
        group.settle()
        leader.peers["x"].match = group.core["a"].state.commit - 1
        group.beat()
    assert group.core["a"].state.membership.voters == ("a", "b", "c", "x")


def test_one_change_at_a_time() -> None:
    group = grown()
    leader = group.core["a"].leader
    assert leader is not None
    leader.propose(group.membership.with_learner("x"), group.now_ms)
    with pytest.raises(Unavailable, match="under way"):
        leader.propose(group.membership.without("b"), group.now_ms)


def test_while_a_change_is_under_way_both_majorities_must_hold_an_entry() -> None:
    """It is not known yet which of the two the coordination store has."""
    group = Group("abcdx", voters="abcd")
    group.elect("a")
    leader = group.core["a"].leader
    assert leader is not None
    leader.propose(group.membership.without("b"), group.now_ms)
    group.isolate("c")
    group.isolate("d")
    group.append("a", 1)
    group.deliver()
    group.deliver()
    assert group.core["a"].state.commit == 1
    group.heal()
    group.cut = {("a", "d"), ("d", "a")}
    group.pass_time(group.timing.heartbeat_ms, "a")
    for _ in range(6):
        group.deliver()
    # a, b and c are a majority of abcd, and a and c one of acd
    assert group.core["a"].state.commit == 2


def test_a_membership_change_waits_until_the_new_majority_holds_all_commits() -> None:
    group = Group("abcde")
    group.elect("a")
    leader = group.core["a"].leader
    assert leader is not None
    for name in "de":
        group.isolate(name)
    group.append("a", 1)
    group.settle()
    leader.propose(group.membership.without("b"), group.now_ms)
    group.carry_out("a")
    group.settle()
    assert group.core["a"].state.membership.voters == ("a", "c", "d", "e")
    # the entry is on a and c: with a and d, or a and e, there would be a majority without it
    with pytest.raises(Unavailable):
        leader.propose(group.core["a"].state.membership.without("c"), group.now_ms)
    group.heal()
    group.beat()
    leader.propose(group.core["a"].state.membership.without("c"), group.now_ms)


def test_a_master_that_does_not_serve_yet_changes_nothing() -> None:
    group = Group()
    group.campaign("a")
    group.deliver()
    group.deliver()
    leader = group.core["a"].leader
    assert leader is not None
    with pytest.raises(Unavailable):
        leader.propose(group.membership.with_learner("x"), group.now_ms)


def test_the_master_does_not_remove_itself() -> None:
    group = grown()
    leader = group.core["a"].leader
    assert leader is not None
    with pytest.raises(InvalidArgument, match="transfer mastership first"):
        leader.propose(group.membership.without("a"), group.now_ms)


def silent(group: Group, *names: str) -> None:
    """These have not answered for long enough that a slave would suspect a master."""
    for name in names:
        group.isolate(name)
    for _ in range(2 + group.timing.suspect_ms // group.timing.heartbeat_ms):
        group.beat()


def test_a_change_that_leaves_no_majority_of_answering_voters_is_refused() -> None:
    group = grown()
    leader = group.core["a"].leader
    assert leader is not None
    silent(group, "c")
    with pytest.raises(
        NoQuorum, match=r"of the voters a, c would not answer: c; .*Remove c instead"
    ):
        leader.propose(group.membership.without("b"), group.now_ms)
    assert leader.change is None
    leader.propose(group.membership.without("c"), group.now_ms)


def test_a_change_that_was_not_made_leaves_everything_as_it_was() -> None:
    group = grown()
    leader = group.core["a"].leader
    assert leader is not None
    leader.propose(group.membership.with_learner("x"), group.now_ms)
    leader.changed(None)
    assert group.core["a"].state.membership == group.membership
    assert set(leader.peers) == {"b", "c"}
    assert leader.may_change()


def test_what_a_replica_acknowledged_before_it_left_does_not_count_when_it_is_back() -> None:
    """It left, lost its last entries, and is back. An answer of its first membership, which comes
    now, is about entries that it lost.
    """
    group = grown()
    leader = group.core["a"].leader
    assert leader is not None
    group.append("a", 3)
    group.settle()
    late = Ack(leader.epoch, leader.peers["c"].round, 4, 4, 4)
    for after in (group.membership.without("c"), group.membership.without("c").with_learner("c")):
        leader.propose(
            ReplicaMembership(leader.state.membership.version + 1, after.voters, after.learners),
            group.now_ms,
        )
        leader.changed(leader.change)
    lost = Mismatch(leader.epoch, leader.peers["c"].round, 2, 0, 0, (EpochRun(leader.epoch, 1),), 2)
    for message in (lost, late):
        group.core["a"].step(group.now_ms, "c", message)
    assert leader.peers["c"].match == 0


def test_a_replica_without_a_vote_does_not_campaign() -> None:
    group = grown()
    group.pass_time(100_000, "x")
    assert not group.queue
    assert not group.requests


def test_a_slave_learns_the_membership_from_the_store_and_never_goes_back() -> None:
    group = grown()
    newer = group.membership.with_learner("x")
    group.core["b"].membership_is(newer)
    group.core["b"].membership_is(group.membership)
    assert group.core["b"].state.membership == newer


# --- handing over ---------------------------------------------------------------------------------


def test_the_mastership_is_handed_over_once_the_other_one_holds_everything() -> None:
    group = Group()
    group.elect("a")
    leader = group.core["a"].leader
    assert leader is not None
    group.append("a", 2)
    leader.transfer("b")
    group.carry_out("a")
    assert not [each for each in group.requests if isinstance(each[1], Campaign)]
    group.settle()
    group.beat()
    assert group.master == "b"
    assert group.log["a"].epochs == group.log["b"].epochs == [1, 1, 1, 2]


def test_the_mastership_goes_to_another_voter() -> None:
    group = grown()
    leader = group.core["a"].leader
    assert leader is not None
    for name, said in (("a", "a is the master already"), ("x", "'x' is no voter")):
        with pytest.raises(InvalidArgument, match=said):
            leader.transfer(name)


def test_a_change_names_the_epoch_and_what_it_replaces() -> None:
    group = grown()
    leader = group.core["a"].leader
    assert leader is not None
    after = group.membership.with_learner("x")
    leader.propose(after, group.now_ms)
    assert group.core["a"].state.ready.requests == [MembershipChange(1, group.membership, after)]
