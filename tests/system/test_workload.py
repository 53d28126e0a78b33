"""The recorders of the fault runs write down what a lone reader polls, and the checkers judge
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from history.checkers import check_all
from history.events import load
from system.workload import ALONE, BATCH, Workload

import qmq
from qmq.testing import TestCluster


class SomeOf:
    """Some of the messages of a pull."""

    def __init__(self, chosen: Sequence[Any], whole: qmq.Messages) -> None:
        self._chosen = chosen
        self._whole = whole

    def __iter__(self) -> Iterator[Any]:
        return iter(self._chosen)

    async def ack_sync(self) -> None:
        await self._whole.ack_sync()


class ForgetfulConsumer:
    """A consumer that leaves a message out of its first poll, and gives it in the second one."""

    def __init__(self, consumer: qmq.Consumer) -> None:
        self._consumer = consumer
        self._kept: list[Any] = []
        self._found: Any = None

    async def pull(self, count: int, wait: timedelta) -> Any:
        if self._kept:
            return SomeOf(self._kept, self._found)
        self._found = await self._consumer.pull(count, wait)
        all_of_them = list(self._found)
        assert len(all_of_them) == BATCH
        self._kept = [all_of_them.pop(BATCH // 2)]
        return SomeOf(all_of_them, self._found)


@pytest.mark.parametrize("is_forgetful", [False, True])
async def test_a_lone_readers_polls_are_recorded_and_judged(
    tmp_path: Path, *, is_forgetful: bool
) -> None:
    async with TestCluster(delay=False) as cluster, cluster.client() as mq:
        workload = Workload(cluster.address, "s", tmp_path / "history.jsonl")
        async with mq.producer("s") as producer:
            await workload.send("p0", producer, tuple(range(1, BATCH + 1)))
        async with mq.consumer("s", ALONE, name="lone", ack="explicit") as consumer:
            read: Any = ForgetfulConsumer(consumer) if is_forgetful else consumer
            for _ in range(1 + is_forgetful):
                await workload.poll("lone", ALONE, read)
        workload.recorder.close()
    names = set(check_all(load(workload.path), drained=False).names)
    assert ({"int_poll_skip", "nonmonotonic_poll"} <= names) if is_forgetful else not names
