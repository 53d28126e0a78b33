"""Asking brokers over their control ports: one replica, a group's master, the masters of many groups at once.

Every call has a deadline. Where the master is comes from the view, which may be a moment late: a replica that says it is not the master,
or that is gone, makes us look into the store once, and ask the new one. What a group does not answer is said with its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from qmq_coordination.broker_groups import MasterRecord, group_key
from qmq_coordination.view import ClusterView

from qmq.errors import CoordinationError, DeadlineExceeded, NotConnected, NotMaster, Outcome, QmqError, Unavailable
from qmq.network import NETWORK, Network
from qmq.proto.v1 import control_pb2_grpc, delay_pb2_grpc
from qmq.rpc import typed_error

BROKER_S: Final = 2.5
AGAIN_S: Final = 2.0
LOOK_S: Final = 1.0
"""For a question, for asking the next master, for looking who that is. Together below the five seconds that clients give a metaserver, so
that they hear which group is silent."""
CHANGE_S: Final = 30.0
"""For handing a mastership over, or changing a group's replicas."""


@dataclass(slots=True)
class BrokerAnswers:
    """What the masters of several groups said, by group."""

    found: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, QmqError] = field(default_factory=dict)
    """They answered that they have nothing of the kind."""
    missing: dict[str, Unavailable] = field(default_factory=dict)
    """They did not answer."""

    def complete(self) -> list[Any]:
        """All answers. Raises NotConnected if a group is missing, and what they said if none has anything."""
        self.require_all(f"not on {', '.join(self.absent)}" if self.absent and not self.found else "")
        if not self.found and self.absent:
            raise next(iter(self.absent.values()))
        return list(self.found.values())

    @property
    def silent(self) -> dict[str, str]:
        """The groups that did not answer, and why: what `partial` leaves out."""
        return {group: failure.message for group, failure in self.missing.items()}

    def partial(self) -> list[Any]:
        """The answers that there are, to be told with `silent`. Raises as `complete`, but only if nobody has anything."""
        return list(self.found.values()) if self.found else self.complete()

    def require_all(self, so_far: str) -> None:
        """Raises NotConnected, naming the groups that did not answer; `so_far` is what is known without them."""
        if self.missing:
            whole = "; ".join(failure.message for failure in self.missing.values())
            failure = next(iter(self.missing.values()))
            raise NotConnected(f"{so_far}{'; ' if so_far else ''}{whole}", outcome=failure.outcome)


class Brokers:
    """The brokers of a view, and the connections to them."""

    def __init__(self, view: ClusterView, network: Network = NETWORK) -> None:
        self._view = view
        self._network = network
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, address: str, method: str, request: Any, timeout_s: float = BROKER_S) -> Any:
        """Call a replica's control port. Raises the typed error that it raised, NotConnected, DeadlineExceeded."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._network.channel(address)
        stub: Any = control_pb2_grpc.BrokerControlStub(channel)
        if not hasattr(stub, method):
            stub = delay_pb2_grpc.DelayControlStub(channel)
        call: Callable[..., Awaitable[Any]] = getattr(stub, method)
        try:
            return await call(request, timeout=timeout_s)
        except grpc.RpcError as cause:
            raise typed_error(cause, address) from cause

    async def ask_master(self, group: str, method: str, request: Any, *, timeout_s: float = BROKER_S, is_change: bool = False) -> Any:
        """Call a group's master. A change is asked of another one only if the first says that it is master no longer.

        If that one had begun (it cannot say what became of it), what the other one refuses may be done already: its outcome is unknown.
        Raises NotConnected: there is none, or it does not answer; and the typed error that it raised.
        """
        master = self._view.group(group).master
        if master is None:
            raise NotConnected(f"broker group {group!r} has no master at the moment: try again soon, or see `qmq cluster status`")
        try:
            return await self.ask(master.control_address, method, request, timeout_s)
        except (NotMaster, NotConnected, DeadlineExceeded) as failure:
            newer = await self._newer(group, failure) if isinstance(failure, NotMaster) or not is_change else None
            if newer is None or newer.control_address == master.control_address:
                raise _silent(group, master, failure) from failure
            was_begun = is_change and failure.outcome is Outcome.UNKNOWN
        try:
            return await self.ask(newer.control_address, method, request, timeout_s if is_change else AGAIN_S)
        except (NotMaster, NotConnected, DeadlineExceeded) as failure:
            raise _silent(group, newer, failure) from failure
        except QmqError as refusal:
            if was_begun:
                raise type(refusal)(refusal.message, outcome=Outcome.UNKNOWN) from refusal
            raise

    async def _newer(self, group: str, failure: Unavailable) -> MasterRecord | None:
        """The master now. After a deadline there was time enough for the watch to bring it; else the store is asked."""
        if not isinstance(failure, DeadlineExceeded):
            with suppress(CoordinationError, TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._view.fetch(group_key(group, "master"))
        return self._view.group(group).master

    async def ask_masters(
        self, groups: Iterable[str], method: str, request: Any, *, absent: tuple[type[QmqError], ...] = (), is_change: bool = False
    ) -> BrokerAnswers:
        """Call the masters of several groups at once. Errors of the kinds `absent` are answers; others but Unavailable are raised."""
        names = list(groups)
        if not names:
            raise NotConnected("no broker is registered: is one running, and can it reach the coordination store?")
        asked = [self.ask_master(group, method, request, is_change=is_change) for group in names]
        answers = BrokerAnswers()
        for group, answer in zip(names, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, absent):
                answers.absent[group] = answer
            elif isinstance(answer, Unavailable):
                answers.missing[group] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.found[group] = answer
        return answers

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


def _silent(group: str, master: MasterRecord, failure: Unavailable) -> NotConnected:
    return NotConnected(
        f"broker group {group!r} does not answer (master {master.replica} at {master.control_address}: {failure.message})",
        outcome=failure.outcome,
    )
