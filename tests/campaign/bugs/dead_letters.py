"""Bugs of dead letters."""

from __future__ import annotations

from typing import Any

from campaign.bugs.storing import replacing
from campaign.values import Bug
from qmq.broker.dead_letters import DeadLetterWriter


def _bury_nowhere(self: DeadLetterWriter, copies: Any) -> int:
    return int(copies.header.count)


BUGS = (
    Bug(
        name="bury-nowhere",
        what="a dead message counts as copied to the dead-letter queue, and is not",
        plant=replacing((DeadLetterWriter, "_append", _bury_nowhere)),
        found_by="dead-letters-none",
        finds=("dead_or_done",),
    ),
)
