"""Asking other servers for the time: when, which servers, and what happens to servers that do not
answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import eventually, node_config, running

from qmq.broker import replica_time
from qmq.broker.replica_time import ControlPorts, TimeWitnesses
from qmq.broker.timekeeper import SteadyClock, wall_ms
from qmq.node.dev_node import Node

HOUR = 3_600_000


class Machine(SteadyClock):
    """A steady clock on a machine whose clocks are moved by hand."""

    def __init__(self) -> None:
        self.now_boot_ms, self.wall_off = 5000, 0
        super().__init__(lambda: self.true_ms() + self.wall_off, lambda: self.now_boot_ms)

    def true_ms(self) -> int:
        return 1_700_000_000_000 + self.now_boot_ms


class Town:
    """Others, who know the true time, or do not."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.errors = {"a:1": 0, "b:1": 5, "c:1": -5}
        self.asked: list[str] = []
        self.silent: set[str] = set()

    async def ask(self, address: str) -> int:
        self.asked.append(address)
        if address in self.silent:
            raise ConnectionRefusedError(address)
        return self.machine.true_ms() + self.errors[address]

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """There are no connections."""

    def rounds(self) -> int:
        """How often all were asked since this was asked last."""
        asked, self.asked = self.asked, []
        assert len(asked) % len(self.errors) == 0
        return len(asked) // len(self.errors)


def fresh() -> tuple[Machine, Town, TimeWitnesses]:
    machine = Machine()
    town = Town(machine)
    return machine, town, TimeWitnesses(machine, lambda: town.errors, ports=town)


async def test_all_are_asked_at_the_start_and_then_every_thirty_seconds() -> None:
    machine, town, asking = fresh()
    await asking.check()
    assert town.rounds() == 1
    assert machine.is_settled
    for _ in range(29):
        machine.now_boot_ms += 1000
        await asking.check()
    assert town.rounds() == 0
    machine.now_boot_ms += 1000
    await asking.check()
    assert town.rounds() == 1


async def test_as_long_as_a_step_is_undecided_they_are_asked_at_each_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine, town, asking = fresh()
    await asking.check()
    machine.wall_off = HOUR
    town.rounds()
    with caplog.at_level(logging.WARNING, "qmq.broker"):
        for _ in range(5):
            machine.now_boot_ms += 1000
            await asking.check()
    assert town.rounds() == 5
    assert machine.time_ms() == machine.true_ms()
    assert [record.getMessage() for record in caplog.records] == [
        (
            "the wall clock differs by +3600000 ms from this server's time: other machines say "
            "that the wall clock is wrong"
        )
    ]
    machine.wall_off = 0
    machine.now_boot_ms += 1000
    await asking.check()
    assert town.rounds() == 0


async def test_a_clock_step_that_witnesses_confirm_is_accepted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine, town, asking = fresh()
    await asking.check()
    machine.wall_off = -HOUR
    machine.now_boot_ms += 1000
    town.errors = dict.fromkeys(town.errors, -HOUR)
    with caplog.at_level(logging.WARNING, "qmq.broker"):
        await asking.check()
    assert machine.time_ms() == machine.true_ms() - HOUR
    assert ["was accepted" in record.getMessage() for record in caplog.records] == [True]


async def test_a_silent_or_unsure_server_does_not_count_as_a_witness() -> None:
    machine, town, asking = fresh()
    town.silent = {"a:1", "b:1"}
    town.errors["c:1"] = -machine.true_ms()
    await asking.check()
    assert machine.timekeeper.wants_witnesses
    town.silent = {"b:1"}
    await asking.check()
    assert not machine.timekeeper.wants_witnesses


async def test_no_more_are_asked_than_a_median_needs() -> None:
    _, town, asking = fresh()
    town.errors = {f"{number}:1": 0 for number in range(100)}
    await asking.check()
    assert town.asked == [f"{number}:1" for number in range(replica_time.WITNESSES_MAX)]


async def test_the_task_continues_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    town = Town(machine)
    calls = iter([{"broken": 0}.__getitem__])

    def addresses() -> list[str]:
        for call in calls:
            call("no such view")
        return list(town.errors)

    asking = TimeWitnesses(machine, addresses, ports=town, check_s=0.001)
    with caplog.at_level(logging.CRITICAL, "qmq.broker"):
        asking.start()
        await eventually(lambda: machine.timekeeper.is_attested)
    await asking.stop()
    seen = len(town.asked)
    await asyncio.sleep(0)
    assert len(town.asked) == seen


def control_address(node: Node) -> str:
    master = node.view.group(node.config.broker.name).master
    assert master is not None
    return master.control_address


async def test_a_replica_says_its_machines_time_over_its_control_port(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node:
        ports = ControlPorts()
        before = wall_ms()
        said = await ports.ask(control_address(node))
        assert before <= said <= wall_ms()
        await ports.keep_only(())


async def test_a_steady_clock_is_attested_by_a_running_replica(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node:
        clock = SteadyClock()
        asking = TimeWitnesses(clock, lambda: [control_address(node), "127.0.0.1:1"])
        asking.start()
        await eventually(lambda: clock.timekeeper.is_attested)
        assert clock.step_ms == 0
        await asking.stop()
