"""Access rules on a running node: real ports, tokens, one client for each principal."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from access_support import ADMIN, guarded
from qmq_coordination.broker_groups import PRESENCE, ReplicaRecord
from support import eventually, node_config, running

import qmq
from qmq.client.connection.connection import connect
from qmq.errors import AccessDenied, InvalidArgument, NotAuthenticated, Stopping
from qmq.model import SubjectFlush
from qmq.node import process
from qmq.proto.v1 import control_pb2, meta_pb2, meta_pb2_grpc
from qmq.rpc.tls_network import network_of
from qmq.security.access import AccessConfig


async def test_a_principal_can_do_only_what_the_rules_allow(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.allow("app:orders", "produce,create", "subject", "orders.*")
        async with cluster.client("app:orders") as orders:
            await orders.send("orders.new", b"1")
            with pytest.raises(
                AccessDenied,
                match=r"app:orders may not .*`qmq acl allow app:orders describe subject payments`",
            ):
                await orders.send("payments", b"1")
            with pytest.raises(AccessDenied):
                await orders.metadata.find_message("orders.new", "0" * 32)
            consumer = orders.consumer("orders.new", group="billing")
            with pytest.raises(AccessDenied, match="consume on"):
                await anext(consumer)


async def test_consuming_needs_the_subject_and_the_group(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.admin.send("orders", b"1")
        await cluster.allow("app:billing", "consume", "subject", "orders")
        async with cluster.client("app:billing") as billing:
            with pytest.raises(AccessDenied, match="group billing"):
                await anext(billing.consumer("orders", group="billing"))
            await cluster.allow("app:billing", "consume", "group", "billing")
            message = await anext(billing.consumer("orders", group="billing", ack="explicit"))
            assert message.body == b"1"
            await message.ack_sync()


async def test_unknown_principals_are_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster, qmq.connect(cluster.node.address) as stranger:
        with pytest.raises(AccessDenied, match="QMQ_TOKEN_FILE"):
            await stranger.send("orders", b"1")
        assert (await stranger.access.whoami()).principal == "any:anonymous"
        with pytest.raises(AccessDenied):
            await stranger.access.rules()


async def test_an_unknown_token_is_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        for token in ("qmq_" + "0" * 12 + "_" + "A" * 43, "nonsense", "a.b.c", "qmqs_" + "A" * 43):
            async with qmq.connect(cluster.node.address, token=token) as stranger:
                with pytest.raises(NotAuthenticated) as refused:
                    await stranger.send("orders", b"1")
            assert token not in str(refused.value)


async def test_a_refusal_does_not_reveal_which_tokens_exist(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        known = await cluster.token("app:orders")
        revoked = await cluster.token("app:gone")
        await cluster.admin.access.delete_tokens(principal="app:gone")
        await eventually(lambda: revoked.split("_")[1] not in cluster.node.view.access.tokens)
        wrong = [f"qmq_{known.split('_')[1]}_{'A' * 43}", f"qmq_{'0' * 12}_{'A' * 43}", revoked]
        said = set[tuple[str, str]]()
        for token in wrong:
            async with qmq.connect(cluster.node.address, token=token) as stranger:
                with pytest.raises(NotAuthenticated) as at_meta:
                    await stranger.access.whoami()
            with pytest.raises(NotAuthenticated) as at_data_port:
                await connect(cluster.node.data_address, "stranger", network_of(None, token))
            said.add((str(at_meta.value), str(at_data_port.value)))
        assert len(said) == 1


async def test_who_may_not_consume_joins_no_ordered_group(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.admin.metadata.create_subject(
            qmq.SubjectConfig("keys", order=qmq.Order.STRICT, logical_partitions=64), partitions=2
        )
        await cluster.admin.send("keys", b"1", key="k")
        await cluster.allow("app:ghost", "produce", "subject", "keys")
        async with cluster.client("app:ghost") as ghost:
            for number in range(3):
                request = meta_pb2.SyncMemberRequest(
                    subject="keys",
                    group="g",
                    consumer=f"ghost{number}",
                    incarnation="i",
                    lease_ms=60_000,
                    start="earliest",
                )
                with pytest.raises(AccessDenied, match="consume on"):
                    await ghost.metadata.call("SyncMember", request)
        consumer = cluster.admin.ordered_consumer("keys", group="g")
        message = await anext(consumer)
        assert message.body == b"1"
        await message.ack_sync()


async def test_a_revoked_token_ends_the_connection_that_showed_it(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.allow("app:orders", "*", "subject")
        await cluster.allow("app:orders", "*", "group")
        async with cluster.client("app:orders") as orders:
            await orders.send("orders", b"1")
            receiving = asyncio.ensure_future(anext(orders.consumer("empty", group="g")))
            await eventually(lambda: orders.connections == 1)
            await cluster.admin.access.delete_tokens(principal="app:orders")
            with pytest.raises(NotAuthenticated):
                await receiving
            with pytest.raises(NotAuthenticated):
                await orders.send("orders", b"2")


async def test_a_right_that_is_taken_ends_consumption_under_way(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.admin.send("orders", b"1")
        await cluster.allow("app:billing", "consume", "group")
        rule = await cluster.allow("app:billing", "consume", "subject")
        async with cluster.client("app:billing") as billing:
            messages = billing.consumer("orders", group="billing", ack="explicit")
            await (await anext(messages)).ack_sync()
            waiting = asyncio.ensure_future(anext(messages))
            await cluster.admin.access.delete_rule(rule)
            with pytest.raises(AccessDenied, match="consume on subject orders"):
                await waiting


async def test_a_rule_that_denies_reaches_a_producer_that_was_allowed(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.allow("app:orders", "produce,create", "subject")
        async with cluster.client("app:orders") as orders:
            await orders.send("orders", b"1")
            rule = await cluster.deny("app:orders", "produce", "subject", "orders")
            with pytest.raises(AccessDenied, match=rule):
                await orders.send("orders", b"2")
            assert (
                await cluster.admin.access.test("app:orders", "produce", "subject", "orders")
            ).rule.id == rule


async def test_watching_lets_everything_pass_and_says_what_it_would_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="qmq.audit"):
        async with (
            guarded(tmp_path, "watch") as cluster,
            qmq.connect(cluster.node.address) as stranger,
        ):
            await stranger.send("orders", b"1")
    told = audit(caplog)
    assert {
        "action": "PRODUCE",
        "on": "subject orders",
        "result": "would be denied",
        "operation": "produce",
    }.items() <= next(each for each in told if each["action"] == "PRODUCE").items()


async def test_principals_that_may_produce_may_send_and_cancel_delayed_messages(
    tmp_path: Path,
) -> None:
    async with guarded(tmp_path, delay=True) as cluster:
        await cluster.admin.send("orders", b"0")
        await cluster.allow("app:orders", "produce", "subject", "orders")
        await cluster.allow("app:other", "produce", "subject", "other")
        async with cluster.client("app:orders") as orders, cluster.client("app:other") as other:
            soon = await orders.send("orders", b"soon", delay=timedelta(milliseconds=50))
            late = await orders.send("orders", b"late", delay=timedelta(days=1))
            assert soon.delayed_id is not None
            assert late.delayed_id is not None
            with pytest.raises(AccessDenied):
                await other.delayed.cancel(late.delayed_id)
            await orders.delayed.cancel(late.delayed_id)
            consumer = cluster.admin.consumer("orders", group="g", start="earliest")
            assert {(await anext(consumer)).body, (await anext(consumer)).body} == {b"0", b"soon"}


async def test_produce_shows_a_delayed_message_without_its_body_and_browse_with_it(
    tmp_path: Path,
) -> None:
    async with guarded(tmp_path, delay=True) as cluster:
        await cluster.admin.send("orders", b"0")
        await cluster.allow("app:orders", "produce", "subject", "orders")
        await cluster.allow("app:reader", "browse", "subject", "orders")
        await cluster.allow("app:other", "produce", "subject", "other")
        async with (
            cluster.client("app:orders") as orders,
            cluster.client("app:reader") as reader,
            cluster.client("app:other") as other,
        ):
            late = (await orders.send("orders", b"late", delay=timedelta(days=1))).delayed_id
            assert late is not None
            shown = await orders.delayed.show(late)
            assert (shown.subject, shown.body) == ("orders", None)
            assert (await reader.delayed.show(late)).body == b"late"
            with pytest.raises(AccessDenied):
                await other.delayed.show(late)
            assert [each async for each in orders.delayed.list("orders", is_half=True)] == []
            for lists in (
                orders.delayed.list("orders"),
                orders.delayed.list(is_half=True),
                other.delayed.list("orders", is_half=True),
            ):
                with pytest.raises(AccessDenied):
                    await anext(lists)


async def test_a_watch_tells_only_permitted_names(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        for subject in ("orders", "secret"):
            await cluster.admin.send(subject, b"1")
        await cluster.allow("app:orders", "describe", "subject", "orders")
        async with cluster.client("app:orders") as orders:
            told: set[str] = set()
            async with aclosing(orders.metadata.watch()) as changes:
                watching = asyncio.ensure_future(anext(changes))
                flush = itertools.cycle(SubjectFlush)
                while "orders" not in told:
                    for subject in ("secret", "orders"):  # until the watch has begun
                        await cluster.admin.metadata.set_subject_flush(subject, next(flush))
                    done, _ = await asyncio.wait([watching], timeout=0.05)
                    if done:
                        told |= set(watching.result().subjects)
                        watching = asyncio.ensure_future(anext(changes))
                watching.cancel()
            assert told == {"orders"}


async def test_an_administrator_cannot_lock_everybody_out(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        own = next(
            each.id for each in (await cluster.admin.access.rules()).rules if each.kind == "cluster"
        )
        with pytest.raises(InvalidArgument, match="administer"):
            await cluster.admin.access.delete_rule(own)
        with pytest.raises(InvalidArgument, match="administer"):
            await cluster.admin.access.put_rule("*", ["administer"], "cluster", is_deny=True)
        async with (
            running(node_config(tmp_path / "other")) as node,
            qmq.connect(node.address) as stranger,
        ):
            with pytest.raises(InvalidArgument, match="administer"):
                await stranger.access.set_mode("enforce")


async def test_rules_hold_behind_a_restart(tmp_path: Path) -> None:
    async with guarded(tmp_path) as cluster:
        token = await cluster.token("app:orders")
    async with (
        running(node_config(tmp_path)) as node,
        qmq.connect(node.address, token=token) as orders,
    ):
        with pytest.raises(AccessDenied):
            await orders.send("orders", b"1")


async def test_a_token_is_not_sent_to_another_machine_in_plain_text() -> None:
    async with qmq.connect("192.0.2.1:20880", token="qmq_" + "0" * 12 + "_" + "A" * 43) as mq:
        with pytest.raises(InvalidArgument, match="plain text"):
            await mq.access.whoami()


def audit(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        json.loads(record.getMessage()) for record in caplog.records if record.name == "qmq.audit"
    ]


async def test_acts_and_refusals_are_recorded_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with guarded(tmp_path) as cluster:
            token = await cluster.token("app:orders")
            async with qmq.connect(cluster.node.address, token=token) as orders:
                with pytest.raises(AccessDenied):
                    await orders.send("orders", b"1")
                with pytest.raises(AccessDenied):
                    await orders.metadata.delete_subject("orders")
            await cluster.admin.metadata.create_subject(qmq.SubjectConfig("orders"))
            await cluster.admin.metadata.delete_subject("orders")
            server_token = cluster.node.view.access.server_token
    told = audit(caplog)
    assert any(
        each["action"] == "DeleteSubject"
        and each["result"] == "denied"
        and each["principal"] == "app:orders"
        for each in told
    )
    assert any(
        each["action"] == "DeleteSubject"
        and each["result"] == "done"
        and each["principal"] == ADMIN
        for each in told
    )
    assert any(each["action"] == "SetAccessMode" and each["result"] == "done" for each in told)
    assert all(each["request"] for each in told if each["action"] != "login")
    everything = "\n".join(record.getMessage() for record in caplog.records)
    assert token.split("_", 2)[2] not in everything
    assert server_token not in everything


async def test_a_call_is_recorded_under_the_name_that_its_caller_gave_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        guarded(tmp_path) as cluster,
        grpc.aio.insecure_channel(cluster.node.address) as channel,
    ):
        for name in ("release-41", "x" * 65):
            with pytest.raises(grpc.aio.AioRpcError, match="an unknown caller"):
                await meta_pb2_grpc.MetaStub(channel).DeleteSubject(
                    control_pb2.DropSubjectRequest(subject=name[:20]),
                    metadata=(("x-request-id", name),),
                )
    named, random = [each["request"] for each in audit(caplog) if each["action"] == "DeleteSubject"]
    assert named == "release-41"
    assert len(random) == 16, "a name that is too long is none"


async def test_the_audit_log_is_a_subject_that_only_servers_write(tmp_path: Path) -> None:
    async with guarded(tmp_path, access=AccessConfig(audit_subject="audit.log")) as cluster:
        consumer = cluster.admin.consumer("audit.log", group="g")
        told = [json.loads((await anext(consumer)).body) for _ in range(5)]
        assert [each["action"] for each in told] == [
            "CreateToken",
            "PutRule",
            "PutRule",
            "PutRule",
            "SetAccessMode",
        ]
        assert told[4]["principal"] == ADMIN
        with pytest.raises(AccessDenied):
            await cluster.admin.send("audit.log", b"{}")


async def test_rules_are_not_enforced_where_servers_cannot_prove_who_they_are(
    tmp_path: Path,
) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        far = ReplicaRecord("b", "g", "192.0.2.7:20881", "192.0.2.7:20882")
        await process.found(node.coordination, "g", ("b",), None)
        await node.coordination.put(PRESENCE + "g/b", far.encode())
        await node.view.refresh()
        assert node.view.present("g")
        made = await mq.access.create_token(ADMIN)
        await mq.access.put_rule(ADMIN, [], "cluster")
        async with qmq.connect(node.address, token=made.token) as admin:
            with pytest.raises(InvalidArgument, match="TLS between machines"):
                await admin.access.set_mode("enforce")
            await admin.access.set_mode("watch")


async def test_a_user_of_this_machine_is_known_by_the_socket_that_the_kernel_vouches_for(
    tmp_path: Path,
) -> None:
    me = f"uid:{os.getuid()}"
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    config = replace(
        node_config(tmp_path / "data"),
        host=f"unix:{folder}/q",
        access=AccessConfig(admins=frozenset({ADMIN})),
    )
    async with running(config) as node, qmq.connect(node.address) as mq:
        assert (await mq.access.whoami()).principal == me
        token = (await mq.access.create_token(ADMIN)).token
        await eventually(lambda: bool(node.view.access.tokens))
        await mq.access.put_rule(me, ["produce", "create"], "subject", "mine.*")
        async with qmq.connect(node.address, token=token) as admin:
            assert (await admin.access.whoami()).principal == ADMIN, (
                "a token goes before the socket"
            )
            await admin.access.set_mode("enforce")
        await eventually(
            lambda: node.view.access.mode.value == "enforce" and bool(node.view.access.rules)
        )
        await mq.send("mine.orders", b"x")
        with pytest.raises(AccessDenied, match=f"{me} may not"):
            await mq.send("orders", b"x")
        for socket in folder.iterdir():
            socket.chmod(0o777)
        with pytest.raises(AccessDenied, match="an unknown caller"):
            await mq.access.rules()


async def test_a_call_after_the_sockets_file_is_gone_hears_that_the_server_stops(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    config = replace(node_config(tmp_path / "data"), host=f"unix:{folder}/q")
    async with running(config) as node, qmq.connect(node.address) as mq:
        await mq.access.whoami()
        for socket in folder.iterdir():
            socket.unlink()
        with pytest.raises(Stopping, match="is gone, so this server is stopping"):
            await mq.access.whoami()


async def test_a_token_for_a_user_of_one_machine_is_refused(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        with pytest.raises(InvalidArgument, match="by the kernel"):
            await mq.access.create_token("uid:0")
