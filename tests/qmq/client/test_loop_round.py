"""A round of the client's event loop: a waiting task continues in the callback that brought the
answer, and what it sends leaves in that round.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from pathlib import Path

import pytest
from support import node_config, running

import qmq
from qmq.client.producing.receipts import BatchReceipt, Ticket
from qmq.process.event_loop import EventLoopTick, TickFuture

RECEIPT = BatchReceipt("s", 0, 0, 1, 1, 1, 1, "g")
SENDS = 300


def in_callback(call: Callable[[], object]) -> None:
    """Run outside of any task, as the event loop runs a protocol."""
    asyncio.get_running_loop().call_soon(call)


class CountingSelector(selectors.DefaultSelector):
    """Counts the rounds of the event loop: each asks the selector once."""

    rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.rounds += 1
        return super().select(timeout)


def test_an_awaited_send_takes_one_round_of_the_loop_at_each_end(tmp_path: Path) -> None:
    selector = CountingSelector()

    async def rounds_of_sends() -> int:
        async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
            for _ in range(10):
                await mq.send("s", b"x")
            before = selector.rounds
            for _ in range(SENDS):
                await mq.send("s", b"x")
            return selector.rounds - before

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        taken = runner.run(rounds_of_sends())
    assert 2 * SENDS <= taken < 3 * SENDS, (
        "flushes and timers add some; a hop over call_soon at either end would add 300"
    )


async def test_the_application_gets_a_message_before_the_next_pull_is_prepared(
    tmp_path: Path,
) -> None:
    async with (
        running(node_config(tmp_path)) as node,
        qmq.connect(node.address) as mq,
        mq.consumer("s", "g") as consumer,
    ):
        await consumer.join()

        async def take() -> int:
            await anext(consumer)
            return consumer.attachments[0].asked

        for _ in range(3):
            taking = asyncio.create_task(take())
            await mq.send("s", b"x")
            assert await taking == 0
            # until this round has ended, in which the receipt may have come, too
            await asyncio.sleep(0)
            assert consumer.attachments[0].asked > 0


async def test_a_task_continues_in_the_callback_that_ended_its_wait() -> None:
    loop_round, said = EventLoopTick(), list[str]()
    ticket = Ticket(loop_round)

    async def wait() -> None:
        await ticket
        said.append("woken")

    def frames_come() -> None:
        loop_round.begin(asyncio.get_running_loop())
        ticket.resolve(RECEIPT)
        said.append("noted")
        loop_round.end()
        said.append("over")

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    in_callback(frames_come)
    await waiting
    assert said == ["noted", "woken", "over"]


async def test_tasks_run_before_calls_and_calls_made_by_tasks_are_of_the_same_round() -> None:
    loop_round, said = EventLoopTick(), list[str]()
    waiters = [TickFuture(), TickFuture()]

    async def wait(waiter: TickFuture, name: str) -> None:
        await waiter
        said.append(name)
        loop_round.at_end(lambda: said.append(f"sent by {name}"))

    tasks = [
        asyncio.create_task(wait(waiter, name)) for waiter, name in zip(waiters, "ab", strict=True)
    ]
    await asyncio.sleep(0)

    def frames_come() -> None:
        loop_round.begin(asyncio.get_running_loop())
        loop_round.at_end(lambda: said.append("first"))
        for waiter in waiters:
            loop_round.wake(waiter)
        loop_round.end()
        said.append("over")

    in_callback(frames_come)
    await asyncio.gather(*tasks)
    assert said == ["a", "b", "first", "sent by a", "sent by b", "over"]


async def test_a_task_cancelled_while_waiting_is_not_woken_again() -> None:
    loop_round, waiter = EventLoopTick(), TickFuture()

    async def wait() -> None:
        await waiter

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert waiting.cancel("enough")
    loop_round.wake(waiter)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert waiting.cancelled()


async def test_who_is_cancelled_after_the_wake_up_is_still_cancelled() -> None:
    loop_round, waiter = EventLoopTick(), TickFuture()

    async def wait() -> None:
        await waiter

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    loop_round.wake(waiter)
    assert waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_timeout_ends_the_wait_for_a_ticket_and_the_ticket_lives_on() -> None:
    ticket = Ticket(EventLoopTick())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await ticket
    ticket.resolve(RECEIPT)
    assert await ticket is RECEIPT


async def test_several_tasks_may_wait_for_one_ticket_also_through_wait_for_and_gather() -> None:
    ticket = Ticket(EventLoopTick())

    async def wait() -> BatchReceipt:
        return await ticket

    waiting = [
        asyncio.create_task(wait()),
        asyncio.create_task(asyncio.wait_for(wait(), 10)),
        asyncio.ensure_future(ticket),
    ]
    await asyncio.sleep(0)
    ticket.resolve(RECEIPT)
    assert await asyncio.gather(*waiting) == [RECEIPT] * 3


async def test_a_failure_at_the_end_of_a_round_is_reported_and_keeps_nothing_else() -> None:
    loop_round, said = EventLoopTick(), list[str]()
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _loop, context: reported.append(context["exception"])
    )
    failure = ValueError("boom")

    def fail() -> None:
        raise failure

    loop_round.at_end(fail)
    loop_round.at_end(lambda: said.append("done"))
    await asyncio.sleep(0)
    assert (reported, said) == ([failure], ["done"])


def test_a_task_that_exits_the_program_lets_the_others_end() -> None:
    ended: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def exits(waiter: TickFuture) -> None:
        await waiter
        raise SystemExit(3)

    async def follows(waiter: TickFuture) -> None:
        try:
            await waiter
        finally:
            ended.append("follows")

    async def program() -> None:
        loop_round, waiters = EventLoopTick(), [TickFuture(), TickFuture()]
        tasks[:] = asyncio.create_task(exits(waiters[0])), asyncio.create_task(follows(waiters[1]))
        await asyncio.sleep(0)
        for waiter in waiters:
            loop_round.wake(waiter)
        await asyncio.wait(tasks)

    with pytest.raises(SystemExit):
        asyncio.run(program())
    assert isinstance(tasks[0].exception(), SystemExit)
    assert ended == ["follows"]
