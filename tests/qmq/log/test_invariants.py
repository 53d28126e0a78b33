"""Invariants that all replicas check: a broken one is noticed with all flags of Python."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.invariants import check_group

from qmq.errors import CorruptBatch, InvariantBroken
from qmq.log import command_messages
from qmq.log.actions import Join, Leave, PullAction, Pulled, Return
from qmq.log.group_state import GroupState
from qmq.log.queue import apply_to
from qmq.model import Partition, QueueId

NAMES = ("s", 0, "g", "c")
_PULL_OF_NOBODY = """
from qmq.log.actions import PullAction, Pulled
from qmq.log.queue import apply_to
from qmq.log.group_state import GroupState
assert False, "this is removed"
apply_to(GroupState(), PullAction("s", 0, "g", "c", (Pulled(0, 1, 1),)))
"""


def test_a_broken_invariant_is_noticed_where_asserts_are_removed() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", _PULL_OF_NOBODY], capture_output=True, text=True, check=False
    )
    assert "InvariantBroken: c was handed messages, and is no consumer" in done.stderr


def test_what_only_the_master_does_and_never_does_wrong_breaks_an_invariant() -> None:
    share = GroupState()
    apply_to(share, Leave(*NAMES, expired=False))
    for action in (PullAction(*NAMES, (Pulled(0, 1, 1),)), Return(*NAMES, received=-1)):
        with pytest.raises(InvariantBroken, match="is no consumer"):
            apply_to(share, action)
    apply_to(share, Join(*NAMES, incarnation="i", lease_ms=1, received=-1))
    apply_to(share, PullAction(*NAMES, (Pulled(0, 2, 1),)))
    with pytest.raises(InvariantBroken, match="nothing that came back begins there"):
        apply_to(share, PullAction(*NAMES, (Pulled(1, 1, 2),)))
    check_group(share)


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b"{}", b"\xff"])
def test_a_command_message_that_cannot_be_read_is_damage(body: bytes) -> None:
    region = command_messages.build(QueueId("s", Partition(1)), "c", 2)
    assert command_messages.read(region, 5).to_version == 2
    own = b'{"change_id": "c", "to_version": 2}'
    with pytest.raises(CorruptBatch, match="command message at sequence 5"):
        command_messages.read(region.replace(own, body.ljust(len(own))), 5)
