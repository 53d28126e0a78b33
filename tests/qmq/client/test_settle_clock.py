"""All consumers and lanes of a client send their verdicts together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from support import eventually

from qmq.client.connection.pool import SettleClock
from qmq.process.event_loop import EventLoopTick


async def test_all_lanes_send_in_one_round_of_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    rounds: list[str] = []

    def lane(name: str) -> Callable[[], None]:
        def send() -> None:
            rounds.append(name)
            loop.call_soon(rounds.append, "next round")

        return send

    clock = SettleClock(EventLoopTick())
    for name in ("first", "second", "third"):
        clock.add(lane(name))
    await eventually(lambda: len(rounds) == 6)
    assert rounds == ["first", "second", "third", "next round", "next round", "next round"]


async def test_a_lane_may_be_added_while_the_others_send() -> None:
    sent: list[int] = []
    clock = SettleClock(EventLoopTick())

    def again() -> None:
        sent.append(len(sent))
        if len(sent) < 3:
            clock.add(again)

    clock.add(again)
    await eventually(lambda: len(sent) == 3)
    assert sent == [0, 1, 2]


async def test_one_that_fails_does_not_keep_the_others_from_sending() -> None:
    loop = asyncio.get_running_loop()
    failures: list[str] = []
    loop.set_exception_handler(lambda _, said: failures.append(str(said["exception"])))
    sent: list[str] = []

    def fails() -> None:
        raise RuntimeError("planted")

    clock = SettleClock(EventLoopTick())
    for send in (lambda: sent.append("first"), fails, lambda: sent.append("last")):
        clock.add(send)
    await eventually(lambda: len(sent) == 2)
    assert (sent, failures) == (["first", "last"], ["planted"])
