"""A message's id contains its producer's id: a client that reads the id must not be able to send as
that producer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from access_support import guarded
from support import eventually

import qmq
from qmq.broker.maintenance import ProducerOwners
from qmq.client.connection.connection import connect
from qmq.errors import AccessDenied
from qmq.model import next_session
from qmq.rpc.tls_network import network_of
from qmq.security.principal import Principal
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind

ORDERS, BILLING = Principal("app", "orders"), Principal("app", "billing")


async def test_a_principal_cannot_fence_an_ordered_session_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(tmp_path) as cluster:
        await cluster.admin.metadata.create_subject(
            qmq.SubjectConfig("keys", order=qmq.Order.STRICT, logical_partitions=1), partitions=1
        )
        await cluster.allow("role:senders", "produce", "subject", "keys")
        await cluster.admin.access.change_role("senders", add=["app:orders", "app:billing"])
        await eventually(lambda: "senders" in cluster.node.view.access.roles)
        async with (
            cluster.client("app:orders") as orders,
            orders.ordered_producer("keys") as producer,
        ):
            sent = await producer.send(b"1", "k")
            envelope, region = encode(
                b"keys",
                Columns([b"forged"], keys=[b"k"], logical_partitions=[0]),
                producer_id=sent.id(0).producer_id,
                batch_sequence=next_session(0),
                create_time_ms=1,
                partition=1,
            )
            stranger = await connect(
                cluster.node.data_address,
                "stranger",
                network_of(None, await cluster.token("app:billing")),
            )
            with pytest.raises(AccessDenied, match="another principal"):
                await stranger.call(FrameKind.PRODUCE, envelope + region, timeout_s=10)
            stranger.close()
            await stranger.wait_closed()
            await producer.send(b"2", "k")
        records = [json.loads(each.message) for each in caplog.records if each.name == "qmq.audit"]
        assert ("app:billing", "PRODUCE", "subject keys") in {
            (each["principal"], each["action"], each["on"]) for each in records
        }


def test_the_first_principal_that_sends_under_an_id_keeps_it() -> None:
    owners = ProducerOwners()
    for _ in range(2):
        owners.claim(7, ORDERS)
        owners.claim(8, BILLING)
    for producer_id, principal in ((7, BILLING), (8, ORDERS)):
        with pytest.raises(AccessDenied):
            owners.claim(producer_id, principal)


def test_who_invents_producer_ids_pushes_out_its_own_only() -> None:
    owners = ProducerOwners(ids_max=3)
    owners.claim(7, ORDERS)
    for producer_id in range(100, 110):
        owners.claim(producer_id, BILLING)
    with pytest.raises(AccessDenied):
        owners.claim(7, BILLING)
    owners.claim(100, ORDERS)
    with pytest.raises(AccessDenied):
        owners.claim(109, ORDERS)


def test_an_id_that_was_pushed_out_is_claimed_again_by_its_next_batch() -> None:
    owners = ProducerOwners(ids_max=3)
    for producer_id in (7, *range(100, 110), 7):
        owners.claim(producer_id, ORDERS)
    with pytest.raises(AccessDenied):
        owners.claim(7, BILLING)
