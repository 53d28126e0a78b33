"""A subject's settings are changed while it is used: brokers follow."""

from __future__ import annotations

from datetime import timedelta

import pytest

import qmq
from qmq.errors import InvalidArgument, MessageTooLarge, UnknownSubject
from qmq.testing import TestCluster, virtual

KIB = 1024


async def first_of(mq: qmq.Client, subject: str) -> int:
    (found,) = await mq.metadata.list_subjects(subject)
    return min(queue.start_sequence for queue in found.queues)


async def test_the_largest_body_and_the_retention_of_a_subject_change_while_it_is_used() -> None:
    async with TestCluster(clock=virtual()) as cluster, cluster.client() as mq:
        for _ in range(50):
            await mq.send("orders", bytes(KIB))
        now = await mq.metadata.alter_subject("orders", body_bytes_max=KIB - 1)
        assert (now.body_bytes_max, now.HasField("retention_ms")) == (KIB - 1, False)

        with pytest.raises(MessageTooLarge):
            while True:
                await mq.send("orders", bytes(KIB))
        assert await first_of(mq, "orders") == 0
        now = await mq.metadata.alter_subject("orders", retention_bytes=10 * KIB)
        assert (now.body_bytes_max, now.retention_bytes) == (KIB - 1, 10 * KIB)

        while await first_of(mq, "orders") <= 30:
            await cluster.clock.advance(timedelta(minutes=2))
        now = await mq.metadata.alter_subject(
            "orders", retention_ms=3_600_000, retention_bytes="default"
        )
        assert (now.retention_ms, now.HasField("retention_bytes")) == (3_600_000, False)


async def test_settings_that_no_subject_can_have_are_refused() -> None:
    async with TestCluster() as cluster, cluster.client() as mq:
        await mq.send("orders", b"1")
        with pytest.raises(InvalidArgument, match="nothing of subject"):
            await mq.metadata.alter_subject("orders")
        with pytest.raises(InvalidArgument, match="positive"):
            await mq.metadata.alter_subject("orders", retention_ms=0)
        with pytest.raises(InvalidArgument, match="1 byte to 15 MiB"):
            await mq.metadata.alter_subject("orders", body_bytes_max=1 << 30)
        with pytest.raises(UnknownSubject):
            await mq.metadata.alter_subject("nothing", retention_ms=1)
