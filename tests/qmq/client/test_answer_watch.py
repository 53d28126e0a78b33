"""One timer looks after all destinations of a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any

from qmq.client.connection.connection import AnswerWatch

AFTER_S = 0.02


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts its timers."""

    timers = 0

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_at(when, callback, *args, context=context)


def run(work: Callable[[CountingLoop], Any]) -> CountingLoop:
    """Run a coroutine function in a loop that counts timers."""
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        runner.run(work(loop))
        return loop


def test_a_thousand_destinations_need_one_timer_and_are_looked_at_in_order() -> None:
    looked: list[int] = []
    ended = asyncio.Event()

    async def work(loop: CountingLoop) -> None:
        watch = AnswerWatch(AFTER_S)
        loop.timers = 0
        for number in range(1000):
            watch.expect(partial(looked.append), number, loop)
        watch.expect(lambda _: ended.set(), 0, loop)
        assert loop.timers == 1
        await ended.wait()
        watch.close()

    run(work)
    assert looked == list(range(1000))


def test_a_destination_that_has_answered_everything_is_not_looked_at() -> None:
    looked: list[str] = []

    async def work(loop: CountingLoop) -> None:
        watch, ended = AnswerWatch(AFTER_S), asyncio.Event()
        silent, answering = (
            (lambda _: looked.append("silent")),
            (lambda _: looked.append("answering")),
        )
        loop.timers = 0
        for _ in range(100):
            watch.expect(answering, 0, loop)
            del watch.expected[answering]
        watch.expect(answering, 0, loop)
        watch.expect(silent, 0, loop)
        del watch.expected[answering]
        watch.expect(lambda _: ended.set(), 0, loop)
        assert loop.timers == 1
        await ended.wait()
        watch.close()

    run(work)
    assert looked == ["silent"]


def test_a_destination_that_has_more_to_answer_is_looked_at_again() -> None:
    looked: list[int] = []

    async def work(loop: CountingLoop) -> None:
        watch, ended = AnswerWatch(AFTER_S), asyncio.Event()

        def look(answers: int) -> int | None:
            looked.append(answers)
            if answers < 3:
                return answers + 1
            ended.set()
            return None

        watch.expect(look, 1, loop)
        await ended.wait()
        assert not watch.expected
        watch.close()

    run(work)
    assert looked == [1, 2, 3]


def test_a_look_that_fails_keeps_no_other_from_its_own() -> None:
    async def work(loop: CountingLoop) -> None:
        watch, ended, failures = AnswerWatch(AFTER_S), asyncio.Event(), []
        loop.set_exception_handler(lambda _, said: failures.append(said["exception"]))

        def fail(_: int) -> None:
            raise ValueError("a look")

        watch.expect(fail, 0, loop)
        watch.expect(lambda _: ended.set(), 0, loop)
        await ended.wait()
        assert [str(each) for each in failures] == ["a look"]
        watch.close()

    run(work)
