"""The lanes of a consumer send their verdicts together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from support import eventually

from qmq.client.consuming.ordered.lane_reader import SettleClock


async def test_all_lanes_send_in_one_round_of_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    rounds: list[str] = []

    def lane(name: str) -> Callable[[], None]:
        def send() -> None:
            rounds.append(name)
            loop.call_soon(rounds.append, "next round")

        return send

    clock = SettleClock(loop)
    for name in ("first", "second", "third"):
        clock.add(lane(name))
    await eventually(lambda: len(rounds) == 6)
    assert rounds == ["first", "second", "third", "next round", "next round", "next round"]


async def test_a_lane_may_be_added_while_the_others_send() -> None:
    sent: list[int] = []
    clock = SettleClock(asyncio.get_running_loop())

    def again() -> None:
        sent.append(len(sent))
        if len(sent) < 3:
            clock.add(again)

    clock.add(again)
    await eventually(lambda: len(sent) == 3)
    assert sent == [0, 1, 2]
