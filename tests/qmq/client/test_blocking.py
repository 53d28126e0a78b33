"""The blocking client is made from the asyncio client, and offers the same calls."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import qmq.blocking
from qmq.errors import ClientClosed, SubjectExists
from qmq.model import SubjectConfig
from qmq.node.dev_node import Node

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import generate_blocking


@pytest.mark.parametrize("module", generate_blocking.MODULES, ids=lambda module: module.path.stem)
def test_the_committed_file_is_what_the_generator_writes(module: generate_blocking.MadeModule) -> None:
    assert module.path.read_text() == generate_blocking.generated(module), "run scripts/generate_blocking.py"


async def test_administration_waits_for_its_answer_and_raises_typed_errors(node: Node) -> None:
    def administer() -> None:
        with qmq.blocking.connect(node.address) as mq:
            made = mq.metadata.create_subject(SubjectConfig("orders", retention_ms=60_000))
            assert (made.name, made.retention_ms) == ("orders", 60_000)
            with pytest.raises(SubjectExists):
                mq.metadata.create_subject(SubjectConfig("orders", retention_ms=70_000))
            assert [each.settings.name for each in mq.metadata.list_subjects("ord")] == ["orders"]
            assert mq.access.whoami().principal

    await asyncio.to_thread(administer)


async def test_threads_share_a_client_and_a_closed_one_says_so(node: Node) -> None:
    def work() -> None:
        bodies = [b"%d" % number for number in range(8)]
        with qmq.blocking.connect(node.address) as mq:
            with ThreadPoolExecutor() as senders:
                receipts = list(senders.map(lambda body: mq.send("s", body), bodies))
            assert len({each.id for each in receipts}) == 8
            with mq.consumer("s", "g") as consumer:
                assert sorted(message.body for _, message in zip(bodies, consumer, strict=False)) == bodies
            administration = mq.metadata
        with pytest.raises(ClientClosed):
            administration.cluster()

    await asyncio.to_thread(work)
