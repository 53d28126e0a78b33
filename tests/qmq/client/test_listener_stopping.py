"""How listeners stop: messages in progress are finished and acknowledged, the others are released
immediately.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from support import eventually

import qmq
from qmq.client.connection.connection import ClientTiming
from qmq.errors import InvalidArgument
from qmq.node.dev_node import Node

TINY = timedelta(milliseconds=20)
LONG = timedelta(hours=1)


async def rest(mq: qmq.Client, count: int) -> list[qmq.Message]:
    found: list[qmq.Message] = []
    async with asyncio.timeout(20), mq.consumer("s", "g", ack="explicit") as consumer:
        while len(found) < count:
            found += await consumer.pull(count)
        found += await consumer.pull(1, TINY)
    return found


async def test_a_stop_under_load_finishes_running_handlers_and_releases_the_rest(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        began: set[int] = set()
        ended: list[int] = []

        @mq.listener("s", group="g", concurrency=8)
        async def handler(number: int) -> None:
            began.add(number)
            if len(began) == 200:
                mq.stop()
            for _ in range(number % 3):
                await asyncio.sleep(0.001)
            ended.append(number)

        await mq.send_many("s", [b"%d" % number for number in range(1_000)])
        await mq.run()
        assert 200 <= len(began) <= 207
        assert sorted(ended) == sorted(began)
        left = await rest(mq, 1_000 - len(began))
        assert sorted([int(each.body) for each in left] + ended) == list(range(1_000))
        assert {each.attempt for each in left} == {1}


async def test_unseen_messages_go_to_others_while_a_slow_handler_still_finishes(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        began, go_on = asyncio.Event(), asyncio.Event()
        ended: list[bytes] = []

        @mq.listener("s", group="g")
        async def slow(body: bytes) -> None:
            began.set()
            await go_on.wait()
            ended.append(body)

        await mq.send_many("s", [b"%d" % number for number in range(10)])
        running = asyncio.create_task(mq.run())
        await began.wait()
        mq.stop()
        assert len(await rest(mq, 9)) == 9
        assert not running.done()
        go_on.set()
        await running
        assert ended == [b"0"]
        assert sorted(each.body for each in await rest(mq, 9)) == [
            b"%d" % number for number in range(1, 10)
        ]


async def test_after_the_grace_handlers_are_cancelled_and_their_messages_released(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        began = asyncio.Event()
        cancelled: list[str] = []

        @mq.listener("s", group="g", retry_delays=[LONG])
        async def hangs(body: bytes) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append("yes")
                raise

        await mq.send("s", b"x")
        async with mq.listening(grace=TINY):
            await began.wait()
        assert cancelled == ["yes"]
        (again,) = await rest(mq, 1)
        assert again.attempt == 2


async def test_a_handler_that_ignores_cancellation_is_left_and_its_message_returns(
    node: Node,
) -> None:
    async with qmq.Client(node.address, timing=ClientTiming(cancel_s=0.05)) as mq:
        began, go_on = asyncio.Event(), asyncio.Event()

        @mq.listener("s", group="g")
        async def stubborn(body: bytes) -> None:
            began.set()
            while not go_on.is_set():
                with suppress(asyncio.CancelledError):
                    await go_on.wait()

        await mq.send("s", b"x")
        async with mq.listening(grace=TINY):
            await began.wait()
        (again,) = await rest(mq, 1)
        assert again.attempt == 2
        go_on.set()
        await asyncio.sleep(0)


async def test_who_cancels_run_or_closes_the_client_stops_with_grace_too(node: Node) -> None:
    for way in ("cancel", "close"):
        mq = qmq.connect(node.address)
        began, go_on = asyncio.Event(), asyncio.Event()
        ended: list[bytes] = []

        async def handler(
            body: bytes,
            began: asyncio.Event = began,
            go_on: asyncio.Event = go_on,
            ended: list[bytes] = ended,
        ) -> None:
            began.set()
            await go_on.wait()
            ended.append(body)

        mq.listen("s", handler, "g")
        await mq.send("s", way)
        running = asyncio.create_task(mq.run())
        await began.wait()
        closing = asyncio.create_task(mq.close()) if way == "close" else None
        if closing is None:
            running.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([running])
        assert running.cancelled() is (way == "cancel")
        await (closing or mq.close())
        assert ended == [way.encode()]
        async with qmq.connect(node.address) as other:
            assert await rest(other, 0) == []


async def test_a_batch_that_is_being_gathered_is_finished_before_the_stop(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        batches: list[list[bytes]] = []

        @mq.listener("s", group="g", batch=(100, LONG))
        async def handler(bodies: list[bytes]) -> None:
            batches.append(bodies)

        await mq.send_many("s", [b"1", b"2"])
        async with mq.listening():
            await eventually(
                lambda: any(
                    isinstance(each, qmq.Consumer) and each.held == 2 for each in mq.consumers
                )
            )
        assert batches == [[b"1", b"2"]]
        assert await rest(mq, 0) == []


async def test_listeners_begin_again_and_join_those_at_work_but_are_not_run_twice(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        with pytest.raises(InvalidArgument, match="no listener is registered"):
            await mq.run()
        mq.stop()
        seen: Counter[str] = Counter()

        @mq.listener("s", group="g")
        async def first(body: bytes) -> None:
            seen["first"] += 1

        async with mq.listening():
            with pytest.raises(InvalidArgument, match="running already"):
                await mq.run()

            @mq.listener("s", group="late")
            async def second(body: bytes) -> None:
                seen["second"] += 1

            await mq.send("s", b"x")
            await eventually(lambda: seen == {"first": 1, "second": 1})
        async with mq.listening():
            await mq.send("s", b"y")
            await eventually(lambda: seen == {"first": 2, "second": 2})


async def test_a_listener_waits_for_a_cluster_that_is_away_and_can_be_stopped_meanwhile() -> None:
    async with qmq.connect("127.0.0.1:1") as mq:

        @mq.listener("s", group="g")
        async def handler(body: bytes) -> None: ...

        running = asyncio.create_task(mq.run())
        await asyncio.sleep(0)
        mq.stop()
        await asyncio.wait_for(running, 20)


SCRIPT = """
    import asyncio, sys
    from pathlib import Path
    import qmq

    mq = qmq.connect(sys.argv[1])

    @mq.listener("finishes", group="g")
    async def finishes(body: bytes) -> None:
        print("began", flush=True)
        while not Path(sys.argv[2]).exists():
            await asyncio.sleep(0.01)
        print("finished", flush=True)

    @mq.listener("hangs", group="g")
    async def hangs(body: bytes) -> None:
        print("began", flush=True)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("cancelled", flush=True)
            raise

    async def main() -> None:
        async with mq:
            await mq.run()
        print("closed", flush=True)

    asyncio.run(main())
"""


async def test_the_first_signal_has_handlers_finish_and_the_second_cancels_them(
    node: Node, tmp_path: Path
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("finishes", b"x")
        await mq.send("hangs", b"x")
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(SCRIPT),
            node.address,
            str(tmp_path / "go"),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")

            async def line() -> str:
                return (await asyncio.to_thread(next, lines, "")).strip()

            assert [await line(), await line()] == ["began", "began"]
            process.terminate()
            (tmp_path / "go").touch()
            assert await line() == "finished"
            process.send_signal(2)
            assert [await line(), await line(), await line()] == ["cancelled", "closed", ""]
            assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        assert len(await mq.consumer("finishes", "g").pull(1, TINY)) == 0
        (again,) = await mq.consumer("hangs", "g").pull(1)
        assert again.attempt == 2
