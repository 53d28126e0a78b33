"""Due items are found once and in order; other items cost no time."""

from __future__ import annotations

import sys
from random import Random

import pytest

from qmq.broker.dispatch.sessions import CheckTimes


class Thing:
    """Compared by identity."""

    def __init__(self, name: int = 0) -> None:
        self.name = name


def test_requests_made_during_a_call_are_answered_by_the_next_call() -> None:
    times, thing = CheckTimes[Thing](), Thing()
    times.at(thing, 1)
    for each in times.due(10):
        times.at(each, 2)
    assert list(times.due(10)) == [thing]


def test_asking_again_for_a_later_time_takes_no_room() -> None:
    times, thing = CheckTimes[Thing](), Thing()
    times.at(thing, 0)
    references = sys.getrefcount(thing)
    for time_ms in range(1_000):
        times.at(thing, time_ms)
    assert sys.getrefcount(thing) < references + 10


@pytest.mark.parametrize("seed", range(20))
def test_items_come_as_a_list_that_is_searched_would_give_them(seed: int) -> None:
    random, times = Random(seed), CheckTimes[Thing]()
    things = [Thing(number) for number in range(8)]
    model: dict[Thing, int] = {}
    now_ms = 0
    for _ in range(400):
        if random.random() < 0.7:
            thing, time_ms = random.choice(things), now_ms + random.randint(-3, 30)
            times.at(thing, time_ms)
            model[thing] = min(time_ms, model.get(thing, time_ms))
        else:
            now_ms += random.randint(0, 12)
            expected = {thing for thing, time_ms in model.items() if time_ms <= now_ms}
            found = list(times.due(now_ms))
            assert len(found) == len(expected)
            assert set(found) == expected
            order = [model.pop(each) for each in found]
            assert order == sorted(order)
        assert len(times) == len(model)
