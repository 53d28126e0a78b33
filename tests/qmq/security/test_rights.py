"""Each call needs the right of its row in rights_table.py: it is enough, and all others are not."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from inspect import isawaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from access_support import SERVICES, Rights, Tokens, addresses, world
from google.protobuf.message_factory import GetMessageClass
from rights_table import ALL, ANSWERS, CALLS, FRAMES, Choice, Row, World

import qmq.proto
from qmq.client.connection.connection import connect
from qmq.errors import AccessDenied, DeadlineExceeded, NotAuthenticated, QmqError
from qmq.rpc.channel import typed_error
from qmq.rpc.server_name import any_server
from qmq.rpc.tls_network import network_of
from qmq.wire.frame import FrameKind

STREAM_S = 2.0
"""The longest wait for the refusal of a stream, which sends nothing while nothing changes."""


def ways(needs: tuple[Choice, ...]) -> Iterable[Rights]:
    """The smallest rights that are enough."""
    return map(frozenset, itertools.product(*map(sorted, needs)))


def lacking(needs: tuple[Choice, ...]) -> Iterable[Rights]:
    """All rights, without one choice."""
    return (ALL - choice for choice in needs)


async def outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of a call, or its error."""
    try:
        return await call()
    except QmqError as failure:
        return failure


Ask = Callable[[str], Awaitable[Any]]
"""Makes the call of a row with a token."""


async def faults(
    name: str, row: Row, tokens: Tokens, ask: Ask, server_token: str
) -> AsyncIterator[str]:
    """What a server does otherwise than the row says."""

    def judge(answer: Any, who: str, *, is_enough: bool) -> str:
        is_denied = isinstance(answer, AccessDenied | NotAuthenticated)
        if row.is_shown is not None:
            is_as_said = not isinstance(answer, QmqError) and row.is_shown(answer) is is_enough
            is_as_said = is_as_said or (is_denied and not is_enough)
        elif not is_enough:
            is_as_said = is_denied
        else:
            is_as_said = not is_denied and (
                not isinstance(answer, QmqError)
                or (row.fails is not None and isinstance(answer, row.fails))
            )
        return "" if is_as_said else f"{name} with {who}: {str(answer)[:200] or 'answered'}"

    needs = row.needs
    if needs is None:
        yield judge(await ask(await tokens.of(ALL)), "all rights", is_enough=False)
        yield judge(await ask(server_token), "the servers' token", is_enough=True)
        return
    for rights in ways(needs):
        yield judge(await ask(await tokens.of(rights)), f"{sorted(rights)}", is_enough=True)
    for rights in lacking(needs):
        yield judge(
            await ask(await tokens.of(rights)), f"all but {sorted(ALL - rights)}", is_enough=False
        )
    if needs:
        yield judge(await ask(await tokens.elsewhere()), "rights on other things", is_enough=False)
        yield judge(await ask(""), "no token", is_enough=False)


@pytest.mark.parametrize("service", SERVICES)
async def test_each_call_needs_its_right_which_is_enough(tmp_path: Path, service: str) -> None:
    async with world(tmp_path) as (cluster, made, tokens):
        found = [
            fault
            for address, _ in await addresses(cluster, service)
            for name, row in CALLS[service]
            async for fault in faults(
                name,
                row,
                tokens,
                caller(address, service, name, row, made),
                cluster.node.view.access.server_token,
            )
            if fault
        ]
    assert not found, "\n".join(found)


def caller(address: str, service: str, name: str, row: Row, made: World) -> Ask:
    method = SERVICES[service].methods_by_name[name]

    async def ask(token: str) -> Any:
        request = row.ask(made)
        request = await request if isawaitable(request) else request
        async with network_of(None, token or None).channel(address, any_server) as channel:
            return await outcome(lambda: called(channel, request))

    async def called(channel: grpc.aio.Channel, request: Any) -> Any:
        path, read = f"/{service}/{name}", GetMessageClass(method.output_type).FromString
        try:
            if not method.server_streaming:
                return await channel.unary_unary(path, type(request).SerializeToString, read)(
                    request
                )
            async for each in channel.unary_stream(path, type(request).SerializeToString, read)(
                request, timeout=STREAM_S
            ):
                return each
        except grpc.RpcError as failure:
            found = typed_error(failure, address)
            if not isinstance(found, DeadlineExceeded):
                raise found from failure
        return None

    return ask


async def test_each_frame_needs_its_right_which_is_enough(tmp_path: Path) -> None:
    async with world(tmp_path) as (cluster, made, tokens):
        found = []
        for (_, address), (kind, row) in itertools.product(
            await addresses(cluster, "qmq.v1.BrokerControl"), FRAMES
        ):
            if address != cluster.node.data_address:
                row = replace(row, fails=QmqError)  # a delay server has no consumers

            async def ask(
                token: str, address: str = address, kind: FrameKind = kind, row: Row = row
            ) -> Any:
                connection = await connect(address, "rights", network_of(None, token or None))
                try:
                    return await outcome(lambda: connection.call(kind, row.ask(made), timeout_s=30))
                finally:
                    connection.close()
                    await connection.wait_closed()

            found += [each async for each in faults(kind.name, row, tokens, ask, "") if each]
    assert not found, "\n".join(found)


OF_CONNECTIONS = {
    FrameKind.HELLO,
    FrameKind.REAUTH,
    FrameKind.REPLICA_HELLO,
    FrameKind.REPLICA,
    FrameKind.BEGUN,
}
"""Frames that say who the peer is: test_access.py and the tests of replicas try them. BEGUN belongs
to a session, and has no answer.
"""


def test_each_call_and_each_frame_has_its_row() -> None:
    modules = [
        each.name
        for each in pkgutil.walk_packages(qmq.proto.__path__, "qmq.proto.")
        if each.name.endswith("_pb2")
    ]
    files = [importlib.import_module(each).DESCRIPTOR for each in modules]
    services = {
        each.full_name: {method.name for method in each.methods}
        for file in files
        for each in file.services_by_name.values()
    }
    services.pop("apache.rocketmq.v2.MessagingService")  # test_gateway_rights.py
    assert services == {service: {name for name, _ in rows} for service, rows in CALLS.items()}
    assert {kind for kind, _ in FRAMES} == set(FrameKind) - ANSWERS - OF_CONNECTIONS
