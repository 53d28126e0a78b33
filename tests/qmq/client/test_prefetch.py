"""Sharing what a consumer may hold."""

from __future__ import annotations

import random
from dataclasses import dataclass

from qmq.client.prefetch import START, TURN_WAIT_MS, WAIT_MS, allowance, grown, start, wait_ms


@dataclass
class Part:
    held: int = 0
    asked: int = 0
    want: int = 0


def test_one_attachment_asks_for_all_that_is_free_but_for_a_second_ones_beginning() -> None:
    part, late = Part(held=50), Part()
    assert allowance(200, [part], part, has_unseen=False) == 150
    part.asked = allowance(2000, [part], part, has_unseen=False)
    assert part.asked == 1950 - START
    assert allowance(2000, [part, late], late, has_unseen=False) == START


def test_a_busy_queue_grows_while_idle_ones_keep_only_what_they_need_to_begin() -> None:
    busy, idle, other = Part(), Part(asked=64), Part(asked=64)
    asks = []
    for _ in range(4):
        ask = allowance(2000, [busy, idle, other], busy, has_unseen=False)
        asks.append(ask)
        busy.want = grown(busy.want, ask, ask, 2000)
    assert asks == [64, 256, 1024, 2000 - 2 * START]


def test_with_unseen_messages_at_hand_a_quarter_must_be_free() -> None:
    part = Part(held=80)
    assert allowance(100, [part], part, has_unseen=True) == 0
    assert allowance(100, [part], part, has_unseen=False) == 20


def test_when_there_is_not_enough_for_all_they_take_turns() -> None:
    assert start(1, 3) == 0
    assert wait_ms(1, 3) == TURN_WAIT_MS
    assert wait_ms(1, 1) == wait_ms(6, 3) == WAIT_MS
    first, second = Part(), Part()
    first.asked = allowance(1, [first, second], first, has_unseen=False)
    assert (first.asked, allowance(1, [first, second], second, has_unseen=False)) == (1, 0)


def test_the_total_is_never_exceeded_and_nobody_is_shut_out() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        total, parts = draw.choice((1, 2, 7, 100, 2000)), [Part() for _ in range(draw.randint(1, 6))]
        for _ in range(100):
            part = draw.choice(parts)
            if part.asked:
                got = draw.choice((0, part.asked, draw.randint(0, part.asked)))
                part.want = grown(part.want, part.asked, got, total)
                part.held, part.asked = part.held + got, 0
            elif draw.random() < 0.5:
                part.held -= draw.randint(0, part.held)
            else:
                part.asked = allowance(total, parts, part, has_unseen=draw.random() < 0.3)
            assert sum(each.held + each.asked for each in parts) <= total, seed
        for part in parts:
            part.held = part.asked = 0
        for part in parts if start(total, len(parts)) else parts[:1]:
            part.asked = allowance(total, parts, part, has_unseen=False)
            assert part.asked > 0, seed
