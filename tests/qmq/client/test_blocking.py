"""The blocking client is made from the asyncio client, and offers the same calls."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import qmq.blocking
from qmq.errors import ClientClosed, InvalidArgument, SubjectExists
from qmq.model import SubjectConfig
from qmq.node.dev_node import Node

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
import generate_blocking


@pytest.mark.parametrize("module", generate_blocking.MODULES, ids=lambda module: module.path.stem)
def test_the_committed_file_is_what_the_generator_writes(
    module: generate_blocking.MadeModule,
) -> None:
    assert module.path.read_text() == generate_blocking.generated(module), (
        "run tools/generate_blocking.py"
    )


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
                assert (
                    sorted(message.body for _, message in zip(bodies, consumer, strict=False))
                    == bodies
                )
            administration = mq.metadata
        with pytest.raises(ClientClosed):
            administration.cluster()

    await asyncio.to_thread(work)


async def test_a_client_that_was_made_before_a_fork_says_so_in_the_child(node: Node) -> None:
    script = """
import os, sys, qmq.blocking
mq = qmq.blocking.connect(sys.argv[1], state_dir=False)
mq.send("s", b"parent")
pid = os.fork()
if pid == 0:
    with mq:
        try:
            mq.send("s", b"child")
        except qmq.errors.ClientClosed as refused:
            print(refused, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
mq.send("s", b"parent again")
mq.close()
"""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, node.address, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await child.communicate()
    assert (b"made before a fork" in said, child.returncode) == (True, 0)


async def test_what_runs_in_the_clients_own_loop_cannot_wait_for_it(node: Node) -> None:
    def work() -> list[str]:
        refused = []
        with qmq.blocking.connect(node.address, state_dir=False) as mq:

            @mq.listener("s", "g")
            async def relay(body: bytes) -> None:
                for wait in (lambda: mq.send("s", body), mq.close):
                    try:
                        wait()
                    except InvalidArgument as failure:
                        refused.append(failure.message)
                mq.stop()

            mq.send("s", b"0")
            mq.run()
            mq.send("s", b"1")
        return refused

    first, second = await asyncio.to_thread(work)
    assert first == second
    assert "its own event loop" in first


@pytest.mark.parametrize("kind", ["browse", "pull", "iterate"])
async def test_closing_a_client_ends_what_other_threads_wait_for(node: Node, kind: str) -> None:
    def wait(mq: qmq.blocking.BlockingClient, begun: threading.Event) -> None:
        consumer = mq.consumer("s", "g")
        waits: dict[str, Callable[[], object]] = {
            "browse": lambda: [begun.set() for _ in mq.browse("s", follow=True)],
            "pull": lambda: [begun.set() for _ in range(10) for _ in consumer.pull()],
            "iterate": lambda: [begun.set() for _ in consumer],
        }
        waits[kind]()

    def work() -> None:
        mq, begun = qmq.blocking.connect(node.address, state_dir=False), threading.Event()
        mq.send("s", b"0")
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(wait, mq, begun)
            assert begun.wait(60)
            mq.close()
            with pytest.raises(ClientClosed):
                waiting.result(60)

    await asyncio.to_thread(work)
