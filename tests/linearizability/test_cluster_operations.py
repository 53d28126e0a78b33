"""Porcupine judges what clients saw who changed routes and reset groups while masters and
metaservers were killed and cut off.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from linearizability.register_history import JUDGE, Call, group_histories, judged, route_histories
from support import forms

from qmq.errors import NotConnected
from qmq.testing import TestCluster
from qmq.testing.cluster import META

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.skipif(
        not JUDGE.is_file(), reason="needs porcupine: put Go on the PATH and run scripts/judges"
    ),
]

CLIENTS = 3
HISTORIES = int(
    os.environ.get("QMQ_TEST_HISTORIES", {"gate": "20", "ci": "40", "all": "300"}[forms.FORM])
)
"""The number of groups. The number of routes is a quarter of this, since a change takes longer."""


def nemesis(
    cluster: TestCluster, random: Random, *, with_meta: bool
) -> Callable[[], Awaitable[None]]:
    """Beside every fourth history: a master is killed and started again, or is cut off for a
    moment; or the metaserver is killed.
    """

    async def disturb() -> None:
        if random.random() > 0.25:
            return
        await asyncio.sleep(random.random() * 0.02)
        try:
            name = META if with_meta and random.random() < 0.5 else cluster.master()
        except NotConnected:
            return
        if name == META or random.random() < 0.5:
            await cluster.kill(name)
            await cluster.restart(name)
        else:
            async with cluster.partition(name):
                await cluster.until_master(other_than=name)

    return disturb


def linearizable(history: list[Call], folder: Path, count: int) -> None:
    code, printed = judged(history, folder)
    assert code == 0, f"{printed}; pictures are in {folder}"
    assert printed.startswith(f"{count} histories")


async def test_resets_of_groups_are_linearizable_where_masters_are_killed_and_cut_off(
    tmp_path: Path,
) -> None:
    async with TestCluster(brokers=3, delay=False) as cluster:
        clients = [cluster.client(at=f"client-{number}") for number in range(CLIENTS)]
        disturb = nemesis(cluster, Random(forms.SEED), with_meta=False)
        linearizable(await group_histories(clients, HISTORIES, disturb), tmp_path, HISTORIES)


async def test_changes_of_routes_are_linearizable_where_servers_are_killed(tmp_path: Path) -> None:
    async with TestCluster(brokers=3, delay=False) as cluster:
        clients = [cluster.client(at=f"client-{number}") for number in range(CLIENTS)]
        random, count = Random(forms.SEED), HISTORIES // 4
        disturb = nemesis(cluster, random, with_meta=True)
        history = await route_histories(clients, count, random, disturb)
        assert any(each.kind == "swap" and each.done for each in history)
        linearizable(history, tmp_path, count)


async def test_a_reset_answered_after_another_call_replaced_it_is_found(tmp_path: Path) -> None:
    async with TestCluster(delay=False) as cluster:
        history = await group_histories([cluster.client() for _ in range(CLIENTS)], 3)
    resets = [number for number, each in enumerate(history) if each.kind == "exchange"]
    wrong = [
        replace(each, found="99") if number == resets[4] else each
        for number, each in enumerate(history)
    ]
    code, printed = judged(wrong, tmp_path)
    assert code == 1, printed
    assert "1 not linearizable" in printed


async def test_two_changes_from_one_version_of_a_route_are_found(tmp_path: Path) -> None:
    async with TestCluster(delay=False) as cluster:
        history = await route_histories([cluster.client() for _ in range(CLIENTS)], 2, Random(1))
    first = next(each for each in history if each.kind == "swap" and each.done)
    code, printed = judged([*history, first], tmp_path)
    assert code == 1, printed
