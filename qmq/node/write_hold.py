"""Holds a master's writes for a moment, so that a backup finds all groups of a cluster at one moment (docs/BACKUP.md).

    hold       begin no new request; answered when all requests that were begun are in the log
    describe   the ends of the logs; answered when everything before them is committed
    release    requests continue; clients that were refused have tried again meanwhile

A hold ends after its time, and with the mastership. `describe` and `release` then raise an error, so the caller knows.
"""

from __future__ import annotations

import asyncio
from typing import Final

from qmq_replication.driver import Driver
from qmq_replication.leader import Leader

from qmq.broker.broker import Broker
from qmq.errors import InvalidArgument, NotMaster, Unavailable
from qmq.proto.v1 import control_pb2 as pb

HOLD_MS_MAX: Final = 5_000
_POLL_S: Final = 0.002


class WriteHold:
    """The hold of one replica; at most one at a time."""

    def __init__(self, broker: Broker, driver: Driver) -> None:
        self._broker = broker
        self._driver = driver
        self._token = ""
        self._leader: Leader | None = None
        self._end: asyncio.TimerHandle | None = None

    @property
    def is_held(self) -> bool:
        return bool(self._token) and self._driver.core.leader is self._leader

    async def begin(self, leader: Leader, token: str, hold_ms: int) -> None:
        """Begin a hold. Raises InvalidArgument, Unavailable, NotMaster."""
        broker = self._broker
        if not token or not 0 < hold_ms <= HOLD_MS_MAX:
            raise InvalidArgument(f"a hold needs a token, and lasts 1 to {HOLD_MS_MAX:,} ms, not {hold_ms:,}")
        if broker.is_paused:
            raise Unavailable(f"{broker.config.name} hands its mastership over, or another backup holds its writes: try again")
        broker.pause()
        if self._end is not None:
            self._end.cancel()  # of a hold that ended with its leader
        self._token, self._leader = token, leader
        self._end = asyncio.get_running_loop().call_later(hold_ms / 1000, self._finish)
        while broker.produces.staged and self.is_held:  # noqa: ASYNC110 - the next turns write them
            await asyncio.sleep(_POLL_S)
        self._require(token)

    async def describe(self, token: str) -> pb.HeldLogs:
        """The ends of the logs. Raises Unavailable."""
        self._require(token)
        store = self._broker.store
        index, ends, bases = store.index, [segments.end for segments in store.logs], [list(segments.bases) for segments in store.logs]
        while store.committed_index < index:
            await asyncio.sleep(_POLL_S)
            self._require(token)
        message, action = [pb.HeldLog(bases=each, end=end) for each, end in zip(bases, ends, strict=True)]
        return pb.HeldLogs(index=index, epoch=self._driver.core.state.promised, message=message, action=action)

    def release(self, token: str) -> None:
        """End the hold. Raises Unavailable."""
        self._require(token)
        self._finish()

    def _require(self, token: str) -> None:
        if self._token != token or not self.is_held:
            raise Unavailable(f"{self._broker.config.name} does not hold its writes under this token any more")
        if not self._broker.is_serving:
            raise NotMaster(f"{self._broker.config.name} lost its mastership while it held its writes")

    def _finish(self) -> None:
        is_held = self.is_held
        self._token = ""
        if self._end is not None:
            self._end.cancel()
        if is_held:
            self._broker.resume()
