"""What a replica may do, and what it tells: its status for operators, its readiness for /readyz
(from memory, so it is cheap), handing over, changes of membership, holds for a backup, and the
lease by which a master may write.

`WriteHold` holds a master's writes for a moment, so that a backup finds all groups of a cluster at
one moment (docs/BACKUP.md).

    hold       begin no new request; answered when all requests that were begun are in the log
    describe   the ends of the logs; answered when everything before them is committed
    release    requests continue; clients that were refused have tried again meanwhile

A hold ends after its time, and with the mastership. `describe` and `release` then raise an error,
so the caller knows.

`WriteLease`: a master may take messages of subjects that are fenced by lease only while the lease
of its master key is alive.

    the store said at t that lease L holds the key          (t is when we *asked*: the lease was
                                                            renewed after that)
        L is the same as before       the right continues until t + lease - a tenth
        L is another one, or the      the key may have been away, and our partitions may have been
        first                         fenced. The fences are listed, missing command messages are
                                      appended, and then there is a right
    no answer                         the right ends by our own clock, before the lease ends at the
                                      store

A fence is only set while the key is away (docs/ORDERING.md), so a list of fences that is read
*after* the key was seen has all fences that were set before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from qmq_coordination.coordination_store import NO_LEASE, CoordinationStore, LeaseId
from qmq_coordination.ordered_records import FENCES, Fence
from qmq_replication.coordinator import Holding
from qmq_replication.core import Replica
from qmq_replication.driver import Driver
from qmq_replication.leader import Leader
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import Role

from qmq.broker.broker import Broker
from qmq.errors import CoordinationError, InvalidArgument, NotMaster, Outcome, QmqError, Unavailable
from qmq.metrics.figures import Readiness
from qmq.model import check_name
from qmq.node.replica.context import read_log
from qmq.process.event_loop import Clock
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
            raise InvalidArgument(
                f"a hold needs a token, and lasts 1 to {HOLD_MS_MAX:,} ms, not {hold_ms:,}"
            )
        if broker.is_paused:
            raise Unavailable(
                f"{broker.config.name} hands its mastership over, or another backup holds "
                "its writes: try again"
            )
        broker.pause()
        if self._end is not None:
            self._end.cancel()  # of a hold that ended with its leader
        self._token, self._leader = token, leader
        self._end = asyncio.get_running_loop().call_later(hold_ms / 1000, self._finish)
        while broker.turns.staged and self.is_held:  # noqa: ASYNC110 - the next turns write them
            await asyncio.sleep(_POLL_S)
        self._require(token)

    async def describe(self, token: str) -> pb.HeldLogs:
        """The ends of the logs. Raises Unavailable."""
        self._require(token)
        store = self._broker.store
        index, ends, bases = (
            store.index,
            [segments.end for segments in store.logs],
            [list(segments.bases) for segments in store.logs],
        )
        while store.committed_index < index:
            await asyncio.sleep(_POLL_S)
            self._require(token)
        message, action = [
            pb.HeldLog(bases=each, end=end) for each, end in zip(bases, ends, strict=True)
        ]
        return pb.HeldLogs(
            index=index, epoch=self._driver.core.state.promised, message=message, action=action
        )

    def release(self, token: str) -> None:
        """End the hold. Raises Unavailable."""
        self._require(token)
        self._finish()

    def _require(self, token: str) -> None:
        if self._token != token or not self.is_held:
            raise Unavailable(
                f"{self._broker.config.name} does not hold its writes under this token any more"
            )
        if not self._broker.is_serving:
            raise NotMaster(
                f"{self._broker.config.name} lost its mastership while it held its writes"
            )

    def _finish(self) -> None:
        is_held = self.is_held
        self._token = ""
        if self._end is not None:
            self._end.cancel()
        if is_held:
            self._broker.resume()


TRANSFER_S: Final = 2.0
CHANGE_S: Final = 10.0
_STATUS_POLL_S: Final = 0.005


class ReplicaStatus:
    """See qmq.broker.admin.GroupStatus."""

    def __init__(self, broker: Broker, driver: Driver, clock: Clock) -> None:
        self._broker = broker
        self._driver = driver
        self._clock = clock
        self._hold = WriteHold(broker, driver)
        self.older_store: Callable[[], str] = str
        """Tells what the coordination store has forgotten; empty if nothing."""

    def _leader(self) -> Leader:
        core = self._driver.core
        leader = core.leader
        if leader is None or not leader.is_serving:
            raise NotMaster(
                f"{self._broker.config.name} is not its group's master: ask "
                f"{core.master or 'the metaserver'}"
            )
        return leader

    # --- reading ----------------------------------------------------------------------------------

    def describe(self) -> pb.ReplicaStatus:
        """The current status."""
        core, store = self._driver.core, self._broker.store
        members = core.state.membership
        return pb.ReplicaStatus(
            replica=core.state.name,
            role=core.state.role.value,
            epoch=core.state.promised,
            master=core.master,
            last_index=core.state.history.last_index,
            stored_index=core.state.stored_index,
            commit_index=core.state.commit,
            message_position=store.messages.end,
            action_position=store.actions.end,
            is_whole=core.state.may_count,
            membership_version=members.version,
            voters=members.voters,
            learners=members.learners,
            peers=self._peers(core.leader),
            is_serving=self._broker.is_serving,
            fork=core.fork,
            older_store=self.older_store(),
        )

    def _peers(self, leader: Leader | None) -> list[pb.Peer]:
        now_ms = self._clock.monotonic_ms()
        return [
            pb.Peer(
                replica=name,
                match_index=peer.match,
                in_step=peer.is_in_step,
                silent_ms=max(now_ms - peer.heard_ms, 0),
            )
            for name, peer in (leader.peers.items() if leader is not None else ())
        ]

    def read_log(self, log: int, position: int, bytes_max: int) -> bytes:
        """Read entries for another replica. Raises LogDamaged, InvalidArgument, Unavailable."""
        if self._driver.is_opening:
            raise Unavailable(
                f"{self._broker.config.name} is reopening its log: try again in a moment"
            )
        return read_log(self._broker.store, log, position, bytes_max)

    # --- holding writes ---------------------------------------------------------------------------

    async def hold(self, token: str, hold_ms: int) -> None:
        """Hold new requests for a time. Raises NotMaster, InvalidArgument, Unavailable."""
        await self._hold.begin(self._leader(), token, hold_ms)

    async def held_logs(self, token: str) -> pb.HeldLogs:
        """The ends of the logs; everything before them is committed.
        Raises NotMaster, Unavailable.
        """
        return await self._hold.describe(token)

    def release(self, token: str) -> None:
        """End a hold. Raises NotMaster, Unavailable."""
        self._hold.release(token)

    # --- handing over -----------------------------------------------------------------------------

    async def transfer(self, to: str) -> pb.TransferResponse:
        """Accept nothing new, wait until `to` has everything, let it campaign. Raises NotMaster,
        InvalidArgument, Unavailable.
        """
        leader, driver = self._leader(), self._driver
        target = to or _most_advanced(leader)
        if self._hold.is_held:
            raise Unavailable("a backup holds the writes of this master for a moment: try again")
        begin_ms = self._clock.monotonic_ms()
        self._broker.pause()
        try:
            driver.act(lambda _: leader.transfer(target))
            async with asyncio.timeout(TRANSFER_S):
                while driver.core.master != target:  # noqa: ASYNC110
                    await asyncio.sleep(_STATUS_POLL_S)
        except TimeoutError:
            text = (
                f"{target} did not take over within {TRANSFER_S} s: is it up to date and reachable?"
            )
            raise Unavailable(text, outcome=Outcome.UNKNOWN) from None
        finally:
            leader.transfer_to = ""
            if driver.core.leader is leader:
                self._broker.resume()
        return pb.TransferResponse(
            master=target,
            epoch=driver.core.state.promised,
            refused_ms=self._clock.monotonic_ms() - begin_ms,
        )

    # --- membership -------------------------------------------------------------------------------

    async def change(self, *, add: str = "", remove: str = "") -> pb.ChangeReplicasResponse:
        """Add a replica (first as a learner, which becomes a voter automatically), or remove one.
        Raises NotMaster, InvalidArgument, NoQuorum, Unavailable.
        """
        leader, driver = self._leader(), self._driver
        if bool(add) == bool(remove):
            raise InvalidArgument("name the replica to add or to remove")
        before = driver.core.state.membership
        after = before.with_learner(check_name("replica", add)) if add else before.without(remove)
        driver.act(lambda now_ms: leader.propose(after, now_ms))
        await self._until_changed(driver, leader, after)
        members = driver.core.state.membership
        return pb.ChangeReplicasResponse(
            membership_version=members.version, voters=members.voters, learners=members.learners
        )

    async def _until_changed(
        self, driver: Driver, leader: Leader, after: ReplicaMembership
    ) -> None:
        try:
            async with asyncio.timeout(CHANGE_S):
                while driver.core.state.membership.version < after.version:
                    if driver.core.leader is not leader:
                        raise NotMaster(
                            (
                                "the mastership was lost during the change: check whether the "
                                "change was made, then ask again"
                            ),
                            outcome=Outcome.UNKNOWN,
                        )
                    await asyncio.sleep(_STATUS_POLL_S)
        except TimeoutError:
            text = "the coordination store did not take the change in time: it may still be made"
            raise Unavailable(text, outcome=Outcome.UNKNOWN) from None


def _most_advanced(leader: Leader) -> str:
    voters = [name for name in leader.state.membership.voters if name in leader.peers]
    if not voters:
        raise InvalidArgument("this group has no other voter to hand over to")
    return max(voters, key=lambda name: (leader.peers[name].is_in_step, leader.peers[name].match))


def of_replica(core: Replica, *, is_serving: bool, has_all: bool = True) -> Readiness:
    """A replica is ready while it serves as master, or has a master and a vote. `has_all`: the
    replica has all data that it needs.
    """
    if not has_all:
        return Readiness(
            False, f"{core.state.role.value}: the schedule is being fetched from another replica"
        )
    if core.state.role is Role.MASTER:
        return Readiness(is_serving, "master" if is_serving else "master: it does not serve yet")
    if core.state.role is not Role.SLAVE or not core.hears_master():
        return Readiness(False, f"{core.state.role.value}: no message from a master")
    if not core.state.may_count:
        return Readiness(
            False,
            "slave: it may lack entries that it acknowledged, and is catching up with its master",
        )
    return Readiness(True, "slave")


log = logging.getLogger("qmq.node")

MARGIN: Final = 0.1
RETRY_S: Final = 0.1


class WriteLease:
    """The write lease of one replica. The broker calls it before each write to
    an ordered subject.
    """

    def __init__(
        self,
        broker: Broker,
        store: CoordinationStore,
        group: str,
        clock: Clock,
        *,
        lease_ms: Callable[[], int],
    ) -> None:
        self._broker = broker
        self._store = store
        self._group = group
        self._clock = clock
        self._lease_ms = lease_ms
        self._lease: LeaseId = NO_LEASE
        """The lease under which the fences were listed."""
        self._epoch = 0
        self._until_ms = 0
        self._confirmed: tuple[int, LeaseId, int] = (0, NO_LEASE, 0)
        self._closing: asyncio.Task[None] | None = None

    def __call__(self) -> bool:
        """True if this replica may write now."""
        return self._clock.monotonic_ms() < self._until_ms

    def held(self, epoch: int, held: Holding, asked_ms: int) -> None:
        """Note that the store confirmed the key of a master of `epoch`,
        which asked at `asked_ms`.
        """
        if held.lease == NO_LEASE or held.epoch != epoch:
            return
        self._confirmed = epoch, held.lease, asked_ms
        if (epoch, held.lease) == (self._epoch, self._lease):
            self._until_ms = asked_ms + int(self._lease_ms() * (1 - MARGIN))
        elif self._closing is None or self._closing.done():
            self._closing = asyncio.ensure_future(self._close_fenced())

    def end(self) -> None:
        """End the mastership."""
        self._until_ms, self._lease, self._epoch = 0, NO_LEASE, 0
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    async def _close_fenced(self) -> None:
        """List the fences that were written after this replica got the key,
        and close their partitions.
        """
        while True:
            epoch, lease, _ = self._confirmed
            with suppress(CoordinationError, QmqError):
                listing = await self._store.list(f"{FENCES}{self._group}/")
                await self._close({item.key: Fence.decode(item.value) for item in listing.items})
                if self._confirmed[:2] == (epoch, lease):
                    self._epoch, self._lease = epoch, lease
                    self._until_ms = self._confirmed[2] + int(self._lease_ms() * (1 - MARGIN))
                    return
            await asyncio.sleep(RETRY_S)

    async def _close(self, fences: dict[str, Fence]) -> None:
        """Append the missing command messages.
        Raises QmqError if the broker does not serve, or not yet.
        """
        for key, fence in fences.items():
            subject, number = key[len(FENCES) + len(self._group) + 1 :].rsplit("/", 1)
            self._broker.require_serving()
            queue = self._broker.store.open_queue(subject, int(number))
            if queue.sealed is None:
                log.warning(
                    (
                        "%s was fenced while this broker group was unreachable: sealing it now "
                        "for change %s"
                    ),
                    queue.id,
                    fence.change_id,
                )
                self._broker.seal(queue, fence.change_id, fence.to_version)
