"""Finds one moment of a whole cluster: a revision of the coordination store, and the end of each group's logs at that moment.

    hold the writes of every master ─▶ ask each for its logs' ends, and the store for its revision ─▶ release every master

While all are held, no group's log gets an entry that a client wrote after it saw another group's log grow. So the ends belong together:
every cause of an entry before them (the message that a consumer handled before it acknowledged another, the delivery that a delay group has
noted) lies before them, too. The route of the revision and the command messages in the logs belong together for the same reason.

Each master says at its release whether it was held without a break. If one was not, or another replica was elected meanwhile, the attempt
fails, and `create` tries again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
from qmq_coordination.broker_groups import GROUPS, BrokerGroupState, group_states
from qmq_coordination.coordination_store import CoordinationStore, KeyListing

from qmq.backup.cluster_items import ROOT
from qmq.errors import QmqError, Unavailable
from qmq.network import Network
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc import typed_error
from qmq.server_name import ServerName, always

log = logging.getLogger("qmq.backup")

HOLD_MS: Final = 2_000
"""The longest time that writes wait. Usually they wait for some hundredths of a second."""
CALL_S: Final = 1.5
TRIES: Final = 10
RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A group at the moment."""

    state: BrokerGroupState
    control_address: str
    logs: pb.HeldLogs


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a whole cluster."""

    listing: KeyListing
    groups: tuple[HeldGroup, ...]
    """The groups by name."""


async def find_moment(store: CoordinationStore, network: Network, *, retry_s: float = RETRY_S) -> Moment:
    """Find one moment. Raises CoordinationError; Unavailable if a group has no master, or its writes could not be held."""
    for tries_left in reversed(range(TRIES)):
        try:
            return await _find(store, network)
        except Unavailable as failure:
            if not tries_left:
                raise
            log.warning("no moment for the backup yet, trying again: %s", failure)
        await asyncio.sleep(retry_s)
    raise AssertionError("the last try returns or raises")


async def _find(store: CoordinationStore, network: Network) -> Moment:
    states = {name: state for name, state in group_states(await store.list(GROUPS)).items() if state.members is not None}
    if not states:
        raise Unavailable("the coordination store knows no broker group: is --etcd that of the cluster?")
    token = secrets.token_hex(8)
    async with _stubs(states, network) as stubs:
        try:
            await _all(stubs, lambda stub: stub.HoldWrites(pb.HoldWritesRequest(token=token, hold_ms=HOLD_MS), timeout=CALL_S))
            ends = await _all(stubs, lambda stub: stub.DescribeHold(pb.DescribeHoldRequest(token=token), timeout=CALL_S))
            revision = (await store.list(GROUPS, limit=1)).revision
        finally:
            released = await _release(stubs, token)
        if released:
            raise released[0]
    listing = await store.list(ROOT, revision=revision)
    return Moment(listing, _matched(states, ends, listing))


def _matched(states: Mapping[str, BrokerGroupState], ends: Mapping[str, pb.HeldLogs], listing: KeyListing) -> tuple[HeldGroup, ...]:
    """The groups, if exactly the groups of this revision were held, under the epochs of this revision."""
    groups = KeyListing(listing.revision, tuple(each for each in listing.items if each.key.startswith(GROUPS)))
    now = {name: state for name, state in group_states(groups).items() if state.members is not None}
    if now.keys() != states.keys():
        raise Unavailable("a group was created while the backup looked for a moment")
    for name, state in now.items():
        if state.claim.epoch != ends[name].epoch:
            raise Unavailable(f"{name} elected another master while the backup looked for a moment")
    return tuple(HeldGroup(now[name], _address(states[name]), ends[name]) for name in sorted(now))


def master_name(state: BrokerGroupState) -> ServerName:
    """The name of a group's master."""
    return ServerName(group=state.name, replica=state.master.replica if state.master is not None else "")


def _address(state: BrokerGroupState) -> str:
    if state.master is None:
        raise Unavailable(f"{state.name} has no master, so its newest entries are not known: a backup needs all groups")
    return state.master.control_address


@asynccontextmanager
async def _stubs(
    states: Mapping[str, BrokerGroupState], network: Network
) -> AsyncIterator[dict[str, tuple[str, control_pb2_grpc.BrokerControlStub]]]:
    """Each group's master."""
    addresses = {name: _address(state) for name, state in states.items()}
    channels = {name: network.channel(address, always(master_name(states[name]))) for name, address in addresses.items()}
    try:
        yield {name: (addresses[name], control_pb2_grpc.BrokerControlStub(channel)) for name, channel in channels.items()}
    finally:
        await asyncio.gather(*[channel.close() for channel in channels.values()])


_Stubs = Mapping[str, tuple[str, Any]]


async def _all(stubs: _Stubs, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    """The answers of all groups. Raises the first failure after all have answered, so that no late request holds a group afterwards."""
    answers = await asyncio.gather(*[_asked(address, call(stub)) for address, stub in stubs.values()], return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return dict(zip(stubs, answers, strict=True))


async def _asked(address: str, answer: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await answer
    except grpc.RpcError as cause:
        failure = typed_error(cause, address)
        raise failure if isinstance(failure, Unavailable) else Unavailable(f"{address} refuses: {failure}") from cause


async def _release(stubs: _Stubs, token: str) -> list[QmqError]:
    """Release all held groups. Returns the failures."""
    request = pb.ReleaseWritesRequest(token=token)
    answers = await asyncio.gather(
        *[_asked(address, stub.ReleaseWrites(request, timeout=CALL_S)) for address, stub in stubs.values()], return_exceptions=True
    )
    return [each for each in answers if isinstance(each, QmqError)]
