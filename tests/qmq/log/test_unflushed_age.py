"""How old the oldest entry is that is not flushed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.log.disk import Unflushed


@given(st.lists(st.sampled_from(["write", "begin", "end"]), max_size=40))
def test_the_age_is_right_whatever_is_written_and_flushed(steps: list[str]) -> None:
    found, index, flushed = Unflushed(), 0, 0
    times: dict[int, int] = {}
    plans: list[int] = []
    for now, step in enumerate(steps):
        if step == "write":
            index += 1
            times[index] = now
            found.wrote(index, now)
        elif step == "begin":
            plans.append(index)
            found.begun()
        elif plans:
            flushed = max(flushed, plans.pop(0))
            found.flushed(flushed)
        oldest = min((at for each, at in times.items() if each > flushed), default=now)
        assert found.age_ms(now) == now - oldest
