"""This release beside the previous one: in one cluster, on one folder, and as clients of each other
(docs/UPGRADES.md).
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_runner import Cluster
from support import NodeProcess, forms, wheels
from system.group import ETCD, METAS, REPLICAS, Group
from system.workload import Workload

import qmq

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.history, pytest.mark.long]
PROGRAM = Path(__file__).with_name("release_program.py")
DELAYS = ("d1-a", "d1-b", "d1-c")
SERVICES = (*METAS, *REPLICAS, *DELAYS)


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The previous release's packages, for PYTHONPATH."""
    return wheels.unpack(tmp_path_factory.mktemp("release"))


def run_program(server: str, name: str, release: Path | None) -> list[str]:
    environment = {**os.environ, **({"PYTHONPATH": str(release)} if release else {})}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), server, name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def version_of(release: Path | None) -> str:
    return qmq.__version__ if release is None else wheels.VERSION


def start(node: NodeProcess, release: Path | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start a node of a release. None means this checkout."""
    with monkeypatch.context() as patch:
        if release is not None:
            patch.setenv("PYTHONPATH", str(release))
        return node.start()


def test_clients_and_nodes_of_both_releases_understand_each_other(
    previous: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node_release, client_release in ((previous, None), (None, previous)):
        node = NodeProcess(tmp_path / ("old" if node_release else "new"))
        try:
            said = run_program(start(node, node_release, monkeypatch), "both", client_release)
        finally:
            node.kill()
        assert sorted(said[1:]) == ["both later", "both now", "both ordered"]
        assert said[0] == f"{version_of(client_release)} says both to {version_of(node_release)}"


def test_a_folder_goes_to_the_new_release_and_back(
    previous: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeProcess(tmp_path / "node")
    for name, release in (
        ("first", previous),
        ("second", None),
        ("third", previous),
        ("fourth", None),
    ):
        try:
            said = run_program(start(node, release, monkeypatch), name, release)
            assert node.stop() == 0, node.errors
        finally:
            node.kill()
        assert said[0] == f"{version_of(release)} says {name} to {version_of(release)}"
        assert sorted(said[1:]) == [f"{name} later", f"{name} now", f"{name} ordered"]


async def test_a_cluster_is_upgraded_and_downgraded_under_load_and_loses_nothing(
    previous: Path, tmp_path: Path
) -> None:
    chance = random.Random(forms.SEED)
    with Cluster(tmp_path / "cluster", "loopback") as cluster:
        await asyncio.to_thread(cluster.up, ETCD)
        cluster.install(previous, *SERVICES)
        await asyncio.to_thread(cluster.up, SERVICES, deps=False)
        group = Group(cluster, tmp_path / "cluster")
        work = Workload(group.server, "upgrades", tmp_path / "history.jsonl")
        await work.start()
        await work.wait_for_acks(500)
        for number, release in enumerate(
            (None, previous, None) if forms.FORM == "all" else (None,)
        ):
            for name in chance.sample(SERVICES, len(SERVICES)):
                work.note(f"{name} becomes {'the previous release' if release else 'this release'}")
                # A kill is the hardest stop: what the other release finds in the folder is not in
                # order.
                await asyncio.to_thread(chance.choice((cluster.stop, cluster.kill)), name)
                cluster.install(release, name)
                await asyncio.to_thread(cluster.start, name)
                await group.settled()
                await work.wait_for_acks(100, within_s=240.0)
            said = await asyncio.to_thread(run_program, group.server, f"step{number}", release)
            assert sorted(said[1:]) == [
                f"step{number} later",
                f"step{number} now",
                f"step{number} ordered",
            ]
        report = await work.stop()
    assert not report.anomalies, [*map(str, report.anomalies)]
    assert report.counts["failed"] == 0
    assert report.counts["acked"] >= 500
