"""Sharing what a consumer may hold."""

from __future__ import annotations

import random
from dataclasses import dataclass

from qmq.client.consuming.acks import UnackedRanges
from qmq.client.consuming.attachment import START, allowance, bytes_allowance, grown, start
from qmq.client.consuming.session import PREFETCH, PREFETCH_MAX, QUICK_S, PrefetchLimit
from qmq.limits import MIB


@dataclass
class Part:
    held: int = 0
    asked: int = 0
    want: int = 0
    held_bytes: int = 0
    asked_bytes: int = 0


def test_a_busy_queue_grows_while_idle_ones_keep_only_what_they_need_to_begin() -> None:
    busy, idle, other = Part(), Part(asked=64), Part(asked=64)
    asks = []
    for _ in range(4):
        ask = allowance(2000, [busy, idle, other], busy, has_unseen=False)
        asks.append(ask)
        busy.want = grown(busy.want, ask, ask, 2000)
    assert asks == [64, 256, 1024, 2000 - 2 * START]


def test_the_total_is_never_exceeded_and_every_part_gets_its_share() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        total, parts = (
            draw.choice((1, 2, 7, 100, 2000)),
            [Part() for _ in range(draw.randint(1, 6))],
        )
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


# --- the total ------------------------------------------------------------------------------------


def pulled(limit: PrefetchLimit, now_s: float, *, is_ahead: bool = True) -> None:
    """A pull leaves now, and finds the application without messages half of `QUICK_S` later."""
    limit.left(now_s, is_ahead=is_ahead)
    limit.starved(now_s + QUICK_S / 2)


def test_an_application_that_is_quick_holds_twice_as_many_each_time_up_to_a_limit() -> None:
    limit = PrefetchLimit(None)
    seen = [limit.messages]
    for number in range(5):
        pulled(limit, number * QUICK_S / 2)
        seen.append(limit.messages)
    assert seen == [PREFETCH, 2 * PREFETCH, 4 * PREFETCH, PREFETCH_MAX, PREFETCH_MAX, PREFETCH_MAX]


def test_an_application_that_waited_for_messages_anyway_holds_no_more() -> None:
    limit = PrefetchLimit(None)
    pulled(limit, 0, is_ahead=False)
    limit.left(1, is_ahead=True)
    limit.starved(1 + 2 * QUICK_S)
    assert limit.messages == PREFETCH


def test_an_application_that_became_slow_holds_half_as_many_each_time() -> None:
    limit = PrefetchLimit(None)
    for number in range(4):
        pulled(limit, number * QUICK_S / 2)
    seen = [limit.messages]
    for number in range(1, 5):
        limit.left(number * 10 * QUICK_S, is_ahead=True)
        seen.append(limit.messages)
    assert seen == [16_000, 8_000, 4_000, 2_000, 2_000]


# --- bytes ----------------------------------------------------------------------------------------


def room(
    total: int, parts: list[Part], part: Part, pull_bytes: int = MIB, *, has_unseen: bool = False
) -> int:
    return bytes_allowance(total, pull_bytes, parts, part, has_unseen=has_unseen)


def test_a_pull_asks_for_the_remaining_bytes_and_an_empty_consumer_may_pull() -> None:
    part = Part()
    assert room(64 * MIB, [part], part) == MIB
    assert room(1000, [part], part) == 1000
    part.held_bytes = 900
    assert (room(1000, [part], part), room(1000, [part], part, pull_bytes=7)) == (100, 7)
    assert room(1000, [part], part, has_unseen=True) == 0, "a quarter is to be free"
    part.held_bytes = 5_000_000
    assert room(1000, [part], part) == 0, (
        "a batch that is larger than the total came, and has to go first"
    )
    part.held_bytes = 0
    assert room(1, [part, Part(), Part()], part) == 1


def test_the_byte_limit_is_exceeded_by_at_most_one_batch_and_blocks_no_one() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        total, batch = draw.choice((1, 10, 1000, 100_000)), draw.choice((1, 400, 50_000))
        parts = [Part() for _ in range(draw.randint(1, 5))]
        for _ in range(100):
            part = draw.choice(parts)
            if part.asked_bytes:
                part.held_bytes += draw.choice(
                    (0, part.asked_bytes, part.asked_bytes - 1 + draw.randint(1, batch))
                )
                part.asked_bytes = 0
            elif draw.random() < 0.5:
                part.held_bytes -= draw.randint(0, part.held_bytes)
            else:
                before = sum(each.held_bytes + each.asked_bytes for each in parts)
                part.asked_bytes = room(
                    total, parts, part, draw.choice((1, 700, MIB)), has_unseen=draw.random() < 0.3
                )
                assert before + part.asked_bytes <= max(total, 1) or not part.asked_bytes, seed
        for part in parts:
            part.held_bytes = part.asked_bytes = 0
        for part in parts if total >= 2 * len(parts) else parts[:1]:
            part.asked_bytes = room(total, parts, part)
            assert part.asked_bytes > 0, seed


def test_the_bytes_of_outstanding_messages_stay_exact() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        outstanding, model, pull = UnackedRanges(), dict[int, int](), 0
        for _ in range(40):
            if draw.random() < 0.4:
                count, size = draw.randint(1, 9), draw.randint(1, 99)
                outstanding.add(pull, count, size)
                model |= dict.fromkeys(range(pull, pull + count), size)
                pull += count + draw.randint(0, 3)
            elif draw.random() < 0.9:
                first = draw.randint(0, pull)
                last = first + draw.randint(0, 12)
                removed = [
                    each for a, b in outstanding.remove(first, last) for each in range(a, b + 1)
                ]
                assert removed == [
                    each for each in range(first, last + 1) if model.pop(each, None)
                ], seed
            else:
                before = draw.randint(0, pull)
                outstanding.cut(before)
                model = {each: size for each, size in model.items() if each < before}
            assert (outstanding.messages, outstanding.bytes) == (len(model), sum(model.values())), (
                seed
            )
