"""Questions about delayed messages, on their way to the delay groups: about one message by its id, about lists to all of them."""

from __future__ import annotations

import heapq
from typing import Any, Final

from qmq_coordination.view import ClusterView

from qmq.errors import InvalidArgument, NotConnected
from qmq.meta.brokers import Brokers
from qmq.model import DelayedId, check_name
from qmq.proto.v1 import delay_pb2 as pb
from qmq.proto.v1 import meta_pb2

LIST_MAX: Final = 1_000
LIST_DEFAULT: Final = 100


class Delays:
    """The delay groups, as a metaserver asks them."""

    def __init__(self, view: ClusterView, brokers: Brokers) -> None:
        self._view = view
        self._brokers = brokers

    def groups(self) -> list[str]:
        """All delay groups, in order."""
        return [state.name for state in self._view.groups() if state.delay is not None]

    async def one(self, method: str, request: Any) -> pb.DelayedMessage:
        """Ask the group that the request's id names. Raises InvalidArgument, what the master raised, NotConnected."""
        group = DelayedId.parse(request.id).group
        if self._view.group(group).delay is None:
            raise InvalidArgument(f"{request.id} names the delay group {group!r}, and there is none of that name")
        found: pb.DelayedMessage = await self._brokers.ask_master(group, method, request, is_change=method != "ShowDelayed")
        return found

    async def listed(self, request: pb.ListDelayedRequest) -> pb.ListDelayedResponse:
        """The groups' lists as one, in the order of due times.

        `next` is the due time and the id behind which to go on, the same for every group.

        Raises NotConnected if a group is missing: a list with holes is a lie.
        """
        if request.subject:
            check_name("subject", request.subject)
        most = min(request.messages_max or LIST_DEFAULT, LIST_MAX)
        asked = pb.ListDelayedRequest()
        asked.CopyFrom(request)
        asked.messages_max = most
        answers = await self._brokers.ask_masters(self._require_groups(), "ListDelayed", asked)
        pages = answers.complete()
        merged = list(heapq.merge(*[page.messages for page in pages], key=_order))
        is_more = len(merged) > most or any(page.next for page in pages)
        kept = merged[:most]
        return pb.ListDelayedResponse(messages=kept, next=_mark(kept[-1]) if is_more and kept else "")

    def _require_groups(self) -> list[str]:
        groups = self.groups()
        if not groups:
            raise NotConnected("there is no delay group: start one with `qmq delay`")
        return groups

    async def describe(self) -> meta_pb2.DescribeDelaysResponse:
        """All groups, and which of them are silent."""
        answers = await self._brokers.ask_masters(self.groups(), "DescribeDelay", pb.DescribeDelayRequest())
        silent = {group: failure.message for group, failure in answers.missing.items()}
        return meta_pb2.DescribeDelaysResponse(delays=list(answers.found.values()), silent=silent)


def _order(message: pb.DelayedMessage) -> tuple[int, str]:
    return message.due_ms, message.id


def _mark(message: pb.DelayedMessage) -> str:
    return f"{message.due_ms}:{message.id}"
