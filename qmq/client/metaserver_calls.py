"""Calls to the metaservers, which fail over between them: the base of the client's calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_random_exponential
from tenacity.stop import stop_base

from qmq.client.connection import TIMING, ClientTiming
from qmq.client.reach_patience import ReachPatience
from qmq.errors import CallerError, Outcome, QmqError, TlsFailed, Unavailable
from qmq.network import NETWORK, Network
from qmq.proto.v1 import access_pb2_grpc, meta_pb2_grpc
from qmq.rpc import is_answer, typed_error
from qmq.server_name import ServerName

CALL_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 3.0


class _NoTls(stop_base):
    """Stops when all of `count` metaservers refused TLS, which retrying does not fix."""

    def __init__(self, unreachable: Mapping[str, QmqError], count: int) -> None:
        self._unreachable, self._count = unreachable, count

    def __call__(self, _: RetryCallState) -> bool:
        refused = [each for each in self._unreachable.values() if isinstance(each, TlsFailed)]
        return len(refused) == self._count


class MetaserverCalls:
    """Every call raises the typed error that the server raised, or NotConnected."""

    def __init__(
        self, addresses: list[str], network: Network = NETWORK, timing: ClientTiming = TIMING, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._network = network
        self._timing = timing
        self._cluster = ""
        """The cluster of the metaserver that answered first. Metaservers of another cluster refuse."""
        self._channels = {each: network.channel(each, lambda: ServerName(self._cluster)) for each in addresses}
        self._stubs: dict[str, Any] = {address: meta_pb2_grpc.MetaStub(channel) for address, channel in self._channels.items()}
        self._access_stubs: dict[str, Any] = {address: access_pb2_grpc.AccessStub(channel) for address, channel in self._channels.items()}
        self._patience = ReachPatience(now_s, timing.mistake_s)
        self._turns = itertools.cycle(addresses)
        self._address = next(self._turns)

    async def call(self, method: str, request: Any) -> Any:
        """Call a method of the metaservers."""
        return await self._call(method, request)

    async def _call(self, method: str, request: Any, *, retry_s: float = RETRY_S, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a method. If a server cannot be reached, try the next one, with jitter, until `retry_s` has passed and,
        unless it is 0, all servers were tried. If one of them may have made a change, the others' failures to answer do not deny it.
        """
        unreachable: dict[str, QmqError] = {}
        is_doubtful = False

        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(Unavailable),
                stop=_NoTls(unreachable, len(self._channels))
                | (stop_after_delay(retry_s) & stop_after_attempt(len(self._channels) if retry_s else 1)),
                wait=wait_random_exponential(multiplier=0.05, max=0.5),
                reraise=True,
            ):
                with attempt:
                    try:
                        return await self._call_once(method, request, timeout_s, unreachable)
                    except QmqError as failure:
                        is_doubtful = is_doubtful or failure.outcome is Outcome.UNKNOWN
                        if is_doubtful and failure.outcome is Outcome.NOT_STORED and not isinstance(failure, CallerError):
                            failure.outcome = Outcome.UNKNOWN
                        raise
        except Unavailable as failure:
            if len(unreachable) < 2 or failure not in unreachable.values():
                raise
            worst = next((each for each in unreachable.values() if each.outcome is Outcome.UNKNOWN), failure)
            whole = "; ".join(each.message for each in unreachable.values())
            raise type(failure)(f"no metaserver answers: {whole}", outcome=worst.outcome) from failure
        raise AssertionError("the loop above returns or raises")

    async def _call_once(self, method: str, request: Any, timeout_s: float, unreachable: dict[str, QmqError] | None = None) -> Any:
        """One try. `unreachable` collects the address if the error did not come from the metaserver."""
        address = self._address
        stubs = self._stubs if hasattr(self._stubs[address], method) else self._access_stubs
        call: Callable[..., Awaitable[Any]] = getattr(stubs[address], method)
        self._patience.tries(address)
        try:
            answer = await call(request, timeout=timeout_s)
            self._patience.reached(address)
            self._cluster = self._cluster or getattr(answer, "cluster", "")
            return answer
        except grpc.RpcError as cause:
            failure = typed_error(cause, address)
            if is_answer(cause):
                self._patience.reached(address)
            else:
                self._patience.failed(address, failure)
            if unreachable is not None and not is_answer(cause):
                unreachable[address] = failure
            # Of several calls that fail at the same time, one changes the server: two changes could lead back to it.
            if isinstance(failure, Unavailable) and self._address == address:
                self.turn()
            raise self._patience.judged(failure, self._channels) from cause

    def turn(self) -> None:
        """Use the next metaserver from now on."""
        self._address = next(self._turns)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
