"""Entries flushed on a majority, with each flush policy: a slave's reports, and how far the master
releases answers.
"""

from __future__ import annotations

from qmq_replication.ready import Ack, Append, Promise
from replication_world import Group


def test_what_only_a_minority_flushed_is_committed_and_not_flushed() -> None:
    group = Group()
    group.elect("a")
    group.settle()
    core = group.core["a"]
    assert core.leader is not None
    last = core.state.history.last_index
    assert core.state.commit == last
    core.flushed(last)
    assert core.leader.flushed == 0
    group.step(
        "b", "a", Ack(core.state.promised, core.leader.peers["b"].round, last, last, last, last)
    )
    assert core.leader.flushed == last


def test_an_older_report_takes_nothing_back() -> None:
    """Such as one of a replica that opened its log again, and does not know yet what is flushed."""
    group = Group()
    group.elect("a")
    group.settle()
    core, slave = group.core["a"], group.core["b"]
    assert core.leader is not None
    last, epoch, peer = core.state.history.last_index, core.state.promised, core.leader.peers["b"]
    for flushed in (last, 0, last - 1):
        group.step("b", "a", Ack(epoch, peer.round, last, last, last, flushed))
        assert peer.flushed == last
    core.flushed(last)
    assert core.leader.flushed == last
    for flushed in (last, 0, last - 1):
        slave.flushed(flushed)
        assert slave.state.flushed_index == last


def test_a_slave_reports_at_once_a_flush_that_a_client_waits_for() -> None:
    group = Group()
    group.elect("a")
    group.settle()
    slave = group.core["b"]
    last, epoch = slave.state.history.last_index, slave.state.promised
    slave.take()
    slave.flushed(last)
    assert not slave.take().messages, "nobody waits: the next Ack is soon enough"
    slave.state.flushed_index = 0
    slave.step(
        group.now_ms,
        "a",
        Append(epoch, slave.round, epoch, last, (), last, last, False, None, last),
    )
    assert slave.take().flush == last
    slave.flushed(last)
    said = [message for _, message in slave.take().messages]
    assert [message.flushed for message in said if isinstance(message, Ack)] == [last]


def test_figure_8_an_older_epochs_flushed_entries_do_not_count_alone() -> None:
    """Everybody's power is cut: an entry of an epoch in between would win against them."""
    group = Group(
        "abcde", logs={"a": (1, 2), "b": (1, 2), "c": (1, 2), "d": (1,), "e": (1, 3)}, epoch=3
    )
    group.campaign("a")
    for name in "bc":
        group.step(name, "a", Promise(4, 2, 2, True))
    core = group.core["a"]
    assert core.leader is not None
    core.flushed(2)
    for name in "bc":
        group.step(name, "a", Ack(4, 0, 3, 3, 3, 2))
    assert (core.state.commit, core.leader.flushed) == (3, 0)
    core.flushed(3)
    for name in "bc":
        group.step(name, "a", Ack(4, 0, 3, 3, 3, 3))
    assert core.leader.flushed == 3


def test_a_cut_lowers_the_flushed_index() -> None:
    group = Group(logs={"a": (1, 1), "b": (1, 1, 1, 1), "c": (1, 1)}, epoch=1)
    core = group.core["b"]
    core.flushed(4)
    core.truncate(2)
    assert core.state.flushed_index == 2
