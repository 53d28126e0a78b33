"""Bugs of retention, of deleted subjects, and of groups that are moved."""

from __future__ import annotations

from typing import Any

from campaign.bugs.storing import replacing
from campaign.values import Bug
from qmq.broker import admin
from qmq.broker.dispatch import pull
from qmq.broker.dispatch.dispatch import Dispatch
from qmq.log import retention
from qmq.log.actions import DropQueue

EARLY_MS = 5_000
_move_start = retention._move_start
_collect_new = pull._collect_new


def _move_start_early(
    queue: Any, first: Any, before_ms: int, bytes_max: int | None, floor: int
) -> Any:
    return _move_start(queue, first, before_ms + EARLY_MS, bytes_max, floor)


def _move_start_far(
    queue: Any, first: Any, before_ms: int, bytes_max: int | None, floor: int
) -> Any:
    return _move_start(queue, first, before_ms, bytes_max and bytes_max // 4, floor)


def _collect_silently(store: Any, reader: Any, group: Any, share: Any, *rest: Any) -> None:
    share.next_sequence = max(share.next_sequence, reader.queue.start_sequence)
    _collect_new(store, reader, group, share, *rest)


def _drop_groups_alone(store: Any, queue: Any) -> None:
    store.write_actions()
    store.act(DropQueue(queue.id.subject, queue.id.partition, "", ""))


def _stay(self: Dispatch, state: Any, sequence: int) -> None:
    return


BUGS = (
    Bug(
        name="delete-early",
        what="retention deletes messages that are five seconds too young",
        plant=replacing((retention, "_move_start", _move_start_early)),
        found_by="retention-age-none",
        finds=("kept_while_young",),
    ),
    Bug(
        name="delete-much",
        what="retention by size keeps a quarter of what it should",
        plant=replacing((retention, "_move_start", _move_start_far)),
        found_by="retention-size-none",
        finds=("kept_while_few",),
    ),
    Bug(
        name="skip-unsaid",
        what="a group whose next messages were deleted continues without a word",
        plant=replacing((pull, "_collect_new", _collect_silently)),
        found_by="retention-age-none",
        finds=("deleted_is_said",),
    ),
    Bug(
        name="keep-deleted-subject",
        what="the messages of a deleted subject stay for the next one of its name",
        plant=replacing((admin, "drop", _drop_groups_alone)),
        found_by="recreated-none",
        finds=("nothing_of_the_old",),
    ),
    Bug(
        name="reset-nothing",
        what="a reset is answered, and the group stays where it is",
        plant=replacing((Dispatch, "reset", _stay)),
        found_by="reset-none",
        finds=("reset_gives_all",),
    ),
)
