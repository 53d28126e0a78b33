"""Bugs of storing and replicating messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qmq_replication.leader import Leader

from campaign.values import Bug
from qmq.broker.dispatch.dispatch import Dispatch
from qmq.log.disk import Disk
from qmq.log.queue import Producers


def replacing(*places: tuple[Any, str, Any]) -> Callable[[], None]:
    """Replace attributes of classes or modules, for as long as the process lives."""

    def plant() -> None:
        for where, name, other in places:
            assert hasattr(where, name), f"{where} has no {name} any more: mend the bug"
            setattr(where, name, other)

    return plant


def _nothing(*_: Any, **__: Any) -> None:
    return


def _settled_without_acting(
    self: Dispatch, state: Any, consumer: str, decided: Any, cause: Any
) -> int:
    return sum(last - first + 1 for first, last, *_ in decided.settlements)


BUGS = (
    Bug(
        name="flush-nothing",
        what="files and folders are never synced",
        plant=replacing(
            (Disk, "kernel_call", _nothing),
            (Disk, "sync", _nothing),
            (Disk, "sync_files", _nothing),
            (Disk, "sync_folder", _nothing),
        ),
        found_by="log-power-all-sync",
        finds=("no_loss", "stable_positions"),
    ),
    Bug(
        name="commit-alone",
        what="what the master has stored counts as stored by a majority",
        plant=replacing((Leader, "quorum_index", lambda self: self.state.stored_index)),
        found_by="log-partition-master",
        finds=("no_loss", "stable_positions", "read_in_order"),
    ),
    Bug(
        name="forget-numbers",
        what="a queue remembers no batch of any producer",
        plant=replacing((Producers, "add", _nothing)),
        found_by="log-partition-no-answers",
        finds=("stored_once",),
    ),
    Bug(
        name="settle-nothing",
        what="verdicts of consumers are answered and not recorded",
        plant=replacing((Dispatch, "_act_settled", _settled_without_acting)),
        found_by="queue-kill-client",
        finds=("acked_stays_done",),
    ),
)
