"""Calls to the delay groups: to one group for a message by its id, or to all groups for lists."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from qmq_coordination.broker_groups import group_key
from qmq_coordination.view import ClusterView

from qmq.delay.delay_requests import ListMark, listing, mark_of, new_due_ms
from qmq.errors import CoordinationError, InvalidArgument, NotConnected, QmqError
from qmq.meta.broker_calls import LOOK_S, Brokers
from qmq.model import DelayedId
from qmq.proto.v1 import delay_pb2 as pb
from qmq.proto.v1 import meta_pb2


class Delays:
    """Calls the delay groups."""

    def __init__(self, view: ClusterView, brokers: Brokers) -> None:
        self._view = view
        self._brokers = brokers

    def groups(self) -> list[str]:
        """All delay groups, in order."""
        return [state.name for state in self._view.groups() if state.delay is not None]

    async def one(self, method: str, request: Any) -> pb.DelayedMessage:
        """Call the group that the request's id names. Raises InvalidArgument, the master's error, NotConnected."""
        group = DelayedId.parse(request.id).group
        if isinstance(request, pb.MoveDelayedRequest):
            new_due_ms(request)
        if group not in self.groups():
            await self._look(self._view.fetch(group_key(group, "delay")))
        groups = await self._require_groups()
        if group not in groups:
            raise InvalidArgument(f"{request.id} belongs to delay group {group!r}, which does not exist; there are {', '.join(groups)}")
        found: pb.DelayedMessage = await self._brokers.ask_master(group, method, request, is_change=method != "ShowDelayed")
        return found

    async def subject_of(self, delayed_id: str) -> str:
        """The subject of a delayed message. Raises as `one`."""
        return (await self.one("ShowDelayed", pb.ShowDelayedRequest(id=delayed_id))).subject

    async def listed(self, request: pb.ListDelayedRequest) -> pb.ListDelayedResponse:
        """The groups' lists as one, in the order of due times.

        `next` is the due time and the id behind which to continue, the same for every group.

        Groups that do not answer are named; their messages are missing. Raises InvalidName, InvalidArgument; NotConnected if all are.
        """
        most = listing(request).most
        asked = pb.ListDelayedRequest()
        asked.CopyFrom(request)
        asked.messages_max = most
        answers = await self._brokers.ask_masters(await self._require_groups(), "ListDelayed", asked)
        page = merged(answers.partial(), most)
        page.silent.update(answers.silent)
        return page

    async def _require_groups(self) -> list[str]:
        """If no delay group is known, read the store: one may be new. Raises NotConnected."""
        if not self.groups():
            await self._look(self._view.refresh())
        groups = self.groups()
        if not groups:
            raise NotConnected("there is no delay group: start one with `qmq delay`")
        return groups

    async def _look(self, question: Coroutine[Any, Any, object]) -> None:
        """Read the store with a short timeout; if it fails, use what is known."""
        with suppress(CoordinationError, TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await question

    async def describe(self) -> meta_pb2.DescribeDelaysResponse:
        """All groups, and which of them failed to answer. Raises NotConnected if there is no delay group."""
        groups = await self._require_groups()
        answers = await self._brokers.ask_masters(groups, "DescribeDelay", pb.DescribeDelayRequest(), absent=(QmqError,))
        silent = {group: failure.message for group, failure in answers.absent.items()}
        return meta_pb2.DescribeDelaysResponse(delays=list(answers.found.values()), silent=silent)


def merged(pages: Sequence[pb.ListDelayedResponse], most: int) -> pb.ListDelayedResponse:
    """One page of several groups' pages. Pure.

    A group whose page is not its last may have more messages right after its mark: so nothing after the lowest of these marks is returned
    yet, since earlier messages might follow.
    """
    goes_on = [ListMark.parse(page.next) for page in pages if page.next]
    end = min(goes_on, default=None)
    known = list(heapq.merge(*[page.messages for page in pages], key=mark_of))
    shown = [message for message in known if end is None or mark_of(message) <= end]
    if len(shown) > most:
        return pb.ListDelayedResponse(messages=shown[:most], next=str(mark_of(shown[most - 1])))
    return pb.ListDelayedResponse(messages=shown, next="" if end is None else str(end))
