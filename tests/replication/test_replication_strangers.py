"""A replica accepts members only, epochs that can have been won, and claims that can be true;
others are recorded with their origin.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qmq_replication.core import EPOCH_SLACK, EXCUSES_MAX
from qmq_replication.driver import TICK_S
from qmq_replication.history import EpochRun
from qmq_replication.links import DIALS, LISTENS, PeerHello, ProofStep, is_proof, prove
from qmq_replication.ready import (
    EPOCH_MAX,
    Ack,
    Append,
    Campaign,
    LogReset,
    LookUp,
    Message,
    Mismatch,
    PromiseRequest,
    Refusal,
    Role,
    Timing,
)
from replication_world import Group

from qmq.errors import ProtocolViolation
from qmq.testing.machine import TIMING

HELLO = PeerHello("g", "a", "b", "nonce")
FAR = 10**15


@pytest.mark.parametrize("sender", ["x", "a"])
@pytest.mark.parametrize(
    "message",
    [
        PromiseRequest(2),
        Append(2, 0, 0, 0, (), 0, 0, False, None),
        LogReset(2, 0, 0, 0, 0, 0),
        Refusal(2),
        Ack(1, 0, 1, 1, 1),
    ],
)
def test_messages_of_strangers_are_ignored(sender: str, message: Message) -> None:
    group = Group()
    group.elect("a")
    before = group.core["a"].state, group.core["a"].state.role
    assert group.step(sender, "a", message) == []
    assert (group.core["a"].state, group.core["a"].state.role) == before
    assert group.core["a"].strangers_heard == 1


def test_an_epoch_is_promised_once_the_store_can_have_given_it() -> None:
    group = Group()
    core = group.core["a"]
    assert group.step("b", "a", PromiseRequest(EPOCH_SLACK + 1)) == []
    assert (core.state.promised, group.requests) == (0, [("a", LookUp())])
    core.on_lookup(0, 0)
    assert group.step("b", "a", PromiseRequest(EPOCH_SLACK + 1)) == []
    core.on_lookup(0, 1)
    assert len(group.step("b", "a", PromiseRequest(EPOCH_SLACK + 1))) == 1
    assert group.disk["a"].promised == EPOCH_SLACK + 1


@pytest.mark.parametrize("far", [EPOCH_MAX + 1, (1 << 63) - 1])
def test_a_promise_to_an_epoch_that_never_existed_is_given_up(far: int) -> None:
    group = Group(logs={"a": (1, 2)})
    group.disk["a"] = group.disk["a"]._replace(promised=far)
    group.start("a")
    group.pass_time(1, "a")
    assert ("a", LookUp()) in group.requests
    group.core["a"].on_lookup(1, 5)
    group.carry_out("a")
    assert group.disk["a"].promised == 5


def test_a_refusal_names_the_bound_of_the_next_epoch() -> None:
    group = Group()
    group.elect("a")
    group.step("b", "a", Refusal(FAR))
    assert (group.core["a"].state.role, group.core["a"].refused_epoch) == (Role.SLAVE, FAR)
    group.elect("c")
    group.step("b", "c", Refusal((1 << 63) - 1))
    assert (group.core["c"].state.role, group.core["c"].refused_epoch) == (Role.MASTER, 0)


@pytest.mark.parametrize(("stored", "last"), [(1 << 40, 1 << 40), (3, 2), (-1, 1), (2, 1 << 40)])
def test_an_acknowledgement_of_a_missing_message_is_refused(stored: int, last: int) -> None:
    group = Group()
    group.elect("a")
    leader = group.core["a"].leader
    assert leader is not None
    with pytest.raises(ProtocolViolation, match="acknowledges"):
        group.core["a"].step(0, "b", Ack(1, leader.peers["b"].round, stored, last, 0))


@pytest.mark.parametrize(
    ("runs", "start", "last"),
    [
        ((EpochRun(1, 5), EpochRun(2, 3)), 0, 9),
        ((EpochRun(2, 1), EpochRun(1, 3)), 0, 9),
        ((EpochRun(1, 10),), 0, 9),
        ((), 9, 5),
        ((EpochRun(1, -7),), 0, 9),
        ((), -1, 3),
    ],
)
def test_a_log_that_cannot_be_is_refused(runs: tuple[EpochRun, ...], start: int, last: int) -> None:
    group = Group()
    group.elect("a")
    leader = group.core["a"].leader
    assert leader is not None
    with pytest.raises(ProtocolViolation, match="describes an impossible log"):
        group.core["a"].step(0, "b", Mismatch(1, leader.peers["b"].round, last, start, 0, runs, 0))


@pytest.mark.parametrize(
    ("runs", "last"),
    [
        ((), 1),
        ((EpochRun(1, 2),), 2),
        ((EpochRun(3, 1),), 1),
        ((EpochRun(2, 1), EpochRun(1, 2)), 2),
        ((EpochRun(1, 1), EpochRun(2, 3)), 2),
        ((EpochRun(1, 1),), 0),
    ],
)
def test_entries_that_do_not_follow_each_other_are_refused(
    runs: tuple[EpochRun, ...], last: int
) -> None:
    group = Group()
    with pytest.raises(ProtocolViolation, match="cannot follow each other in a log"):
        group.core["a"].step(0, "b", Append(2, 0, 0, 0, runs, last, 0, False, ()))
    assert group.core["a"].state.promised == 0


# --- whom it accuses ------------------------------------------------------------------------------


def test_a_slave_that_was_late_itself_waits_for_the_master_again() -> None:
    group = Group()
    group.elect("a")
    core, wait_ms = group.core["b"], group.timing.suspect_ms * 2
    for turn in range(1, EXCUSES_MAX + 2):
        core.tick(turn * wait_ms, wait_ms - 50)
        assert core.state.role is (Role.SLAVE if turn <= EXCUSES_MAX else Role.POLLING)


@pytest.mark.parametrize("timing", [Timing(), TIMING], ids=["servers", "TestCluster"])
def test_a_pause_of_a_process_that_has_all_replicas_ends_no_mastership(timing: Timing) -> None:
    tick_ms = int(TICK_S * 1000)
    for pause_ms in range(0, 2 * timing.suspect_ms, 10):
        group = Group(timing=timing)
        group.elect("a")
        silent_ms = timing.heartbeat_ms + tick_ms + pause_ms
        group.core["b"].tick(group.now_ms + silent_ms, max(pause_ms - tick_ms, 0))
        assert group.core["b"].state.role is Role.SLAVE, pause_ms


def test_a_slave_that_was_in_time_suspects_a_silent_master() -> None:
    group = Group()
    group.elect("a")
    group.core["b"].tick(group.timing.suspect_ms * 2, 50)
    assert group.core["b"].state.role is Role.POLLING
    assert Campaign() not in group.core["b"].state.ready.requests


# --- proofs ---------------------------------------------------------------------------------------


def test_a_proof_fits_one_connection_one_direction_and_one_secret() -> None:
    proof = prove(b"secret", DIALS, HELLO, "challenge")
    assert is_proof(proof, b"secret", DIALS, HELLO, "challenge")
    others = [HELLO._replace(**{name: "other"}) for name in HELLO._fields]
    assert not any(is_proof(proof, b"secret", DIALS, each, "challenge") for each in others)
    assert not is_proof(proof, b"secret", LISTENS, HELLO, "challenge")
    assert not is_proof(proof, b"secret", DIALS, HELLO, "another")
    assert not is_proof(proof, b"other", DIALS, HELLO, "challenge")
    assert not is_proof(prove(b"", DIALS, HELLO, "challenge"), b"", DIALS, HELLO, "challenge")
    assert not is_proof("pröof", b"secret", DIALS, HELLO, "challenge")


def test_replicas_introduce_themselves() -> None:
    assert PeerHello.unpack(memoryview(HELLO.pack())) == HELLO
    assert ProofStep.unpack(memoryview(ProofStep("n", "p").pack())) == ProofStep("n", "p")


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"{", b"[]", b"3", b"null", b'"x"', b"{}"),
        b'{"version": 1, "group": "g", "replica": "b"}',
        b'{"version": 2}',
        b"\xff\xfe",
        b'{"version": 2, "group": "g", "replica": "b", "to": 7, "nonce": "n"}',
        pytest.param(b"[" * 4_000, id="deep"),
    ],
)
def test_a_malformed_introduction_is_refused(said: bytes) -> None:
    for kind in (PeerHello, ProofStep):
        with pytest.raises(ProtocolViolation):
            kind.unpack(memoryview(said))  # type: ignore[attr-defined]


@given(
    st.dictionaries(
        st.sampled_from(["version", "group", "replica", "to", "nonce", "proof"]),
        st.none() | st.integers() | st.text(),
    )
)
def test_any_hello_is_understood_or_refused(found: dict[str, object]) -> None:
    for kind in (PeerHello, ProofStep):
        try:
            kind.unpack(memoryview(json.dumps(found).encode()))  # type: ignore[attr-defined]
        except ProtocolViolation:
            pass


def test_half_a_character_is_not_accepted_as_a_proof() -> None:
    with pytest.raises(ProtocolViolation, match="surrogate"):
        ProofStep.unpack(memoryview(b'{"nonce": "", "proof": "\\ud800"}'))
