"""A client's name goes to people and to other programs: a broker takes none that would break them."""

from __future__ import annotations

import pytest

import qmq
from qmq.client.connection import connect
from qmq.errors import InvalidArgument, InvalidName
from qmq.testing import TestCluster


@pytest.mark.parametrize("name", ["a\ud800b", "\x1b]0;owned\x07", "x" * 128, "line\nbreak", "\u202e"])
async def test_a_client_with_an_unprintable_name_is_refused(name: str) -> None:
    async with TestCluster() as cluster:
        mq = cluster.client()
        await mq.send("s", b"1")
        address = (await mq.metadata.locate("s")).routes[0].data_address
        with pytest.raises((InvalidName, InvalidArgument), match=r"printable|half of a surrogate pair"):
            await connect(address, name)
        async with mq.consumer("s", "g") as consumer:
            await (await consumer.pull(1)).ack_sync()
            assert [each.group for each in await mq.metadata.describe_groups()] == ["g"]


async def test_a_printable_name_is_taken() -> None:
    async with TestCluster() as cluster:
        mq: qmq.Client = cluster.client()
        await mq.send("s", b"1")
        address = (await mq.metadata.locate("s")).routes[0].data_address
        (await connect(address, "Grüße 7")).close()
