"""Asks other machines for the time: brokers and replicas, over their control ports (`DescribeReplica`, which slaves answer, too).

The task asks once at the start, then every thirty seconds, and every second while the kept time has a step to decide
(qmq/broker/timekeeper.py). Witnesses answer with their machine's wall clock, even delay servers, because their kept time would not be
independent. An answer that takes more than a second is ignored; no single answer is required.

This task also reads the clock once a second, so that it notices a step at once, without waiting for the next caller. It logs each step
twice: when the step lasts, and when it is accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final

import grpc

from qmq.broker.timekeeper import SteadyClock
from qmq.proto.v1 import control_pb2, control_pb2_grpc
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.server_name import any_server

log = logging.getLogger("qmq.broker")

WITNESSES_MAX: Final = 15
"""More witnesses do not improve the median."""
ASK_S: Final = 1.0
"""How long an answer may take."""
LOOK_S: Final = 1.0
"""How often this machine's clock is read."""
ASK_EVERY_MS: Final = 30_000
"""How often witnesses are asked while clocks agree."""

AskTime = Callable[[str], Awaitable[int]]
"""The time at a control address, in milliseconds; 0 if it is not known. An error other than a cancellation means no answer."""


class ControlPorts:
    """The control connections to witnesses."""

    def __init__(self, network: Network = NETWORK) -> None:
        self._network = network
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, address: str) -> int:
        """See `AskTime`. Raises grpc.RpcError."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._network.channel(address, any_server)  # any machine may be a witness
        answer = await control_pb2_grpc.BrokerControlStub(channel).DescribeReplica(control_pb2.DescribeReplicaRequest(), timeout=ASK_S)
        return int(answer.time_ms)

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """Close the connections to all others."""
        for address in set(self._channels).difference(addresses):
            await self._channels.pop(address).close()


class TimeWitnesses:
    """The task that asks. `addresses` returns the control addresses of other machines' brokers and replicas, the best witnesses first."""

    def __init__(
        self,
        clock: SteadyClock,
        addresses: Callable[[], Iterable[str]],
        *,
        ask: AskTime | None = None,
        network: Network = NETWORK,
        look_s: float = LOOK_S,
        after_look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`after_look` is called after each reading of the clock."""
        self._after_look = after_look
        self._look_s = look_s
        self._clock = clock
        self._addresses = addresses
        self._ports = ControlPorts(network)
        self._ask = ask or self._ports.ask
        self._asked_boot_ms: int | None = None
        self._told = (0, 0)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End, and close the connections."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._ports.keep_only(())

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("asking the other machines for the time failed")
            await asyncio.sleep(self._look_s)

    async def look(self) -> None:
        """Read the clock, and ask witnesses if it is time."""
        self._clock.time_ms()
        now_ms = self._clock.boot_ms()
        if self._clock.timekeeper.wants_witnesses or self._asked_boot_ms is None or now_ms - self._asked_boot_ms >= ASK_EVERY_MS:
            self._asked_boot_ms = now_ms
            await self._ask_all()
            self._clock.time_ms()
        self._tell()
        if self._after_look is not None:
            await self._after_look()

    async def _ask_all(self) -> None:
        addresses = list(self._addresses())[:WITNESSES_MAX]
        await asyncio.gather(*[self._ask_one(address) for address in addresses])
        await self._ports.keep_only(addresses)

    async def _ask_one(self, address: str) -> None:
        sent_ms = self._clock.boot_ms()
        try:
            async with asyncio.timeout(ASK_S):
                their_ms = await self._ask(address)
        except Exception as failure:
            log.debug("%s did not answer with its time: %s", address, failure)
            return
        if their_ms > 0:
            self._clock.witness(address, their_ms, sent_ms, self._clock.boot_ms())

    def _tell(self) -> None:
        """Log each step once when it is noticed, and once when it is accepted."""
        timekeeper = self._clock.timekeeper
        step, (noticed, accepted) = timekeeper.step, self._told
        if timekeeper.steps_accepted > accepted:
            log.warning("the wall clock's step was accepted: this server's time is now %d ms since 1970", self._clock.time_ms())
        if step is not None and step.noticed_boot_ms != noticed:
            why = "other machines say that the wall clock is wrong" if step.is_denied else "not accepted yet"
            log.warning("the wall clock differs by %+d ms from this server's time: %s", step.size_ms, why)
        self._told = (step.noticed_boot_ms if step is not None else 0, timekeeper.steps_accepted)
