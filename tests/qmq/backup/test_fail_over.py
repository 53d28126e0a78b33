"""The runbook of a fail-over and a fail-back, walked with its own commands."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from live_cluster import GROUP, ORDERED, PLAIN, History, LiveCluster, rest, running

ROOT = Path(__file__).resolve().parents[3]


class Runbook:
    """The commands of the runbook's section, in their order."""

    def __init__(self, state: Path) -> None:
        page = (ROOT / "docs" / "RUNBOOKS.md").read_text()
        section = page[page.index("## Fail-over to a second cluster") :]
        self._commands = re.findall(r"^ *(qmq mirror .*)$", section, re.MULTILINE)
        self._environment = {**os.environ, "XDG_STATE_HOME": str(state)}

    def _next(self, east: str, west: str) -> list[str]:
        words = shlex.split(self._commands.pop(0))[1:]
        return [
            sys.executable,
            "-m",
            "qmq.cli",
            *[{"EAST": east, "WEST": west}.get(word, word) for word in words],
        ]

    def start(self, east: str, west: str) -> subprocess.Popen[str]:
        """Begin the next command, which runs until it is stopped."""
        process = subprocess.Popen(
            self._next(east, west), stdout=subprocess.PIPE, text=True, env=self._environment
        )
        assert process.stdout is not None
        assert "qmq mirror is ready" in process.stdout.readline()
        return process

    async def run(self, east: str, west: str, *more: str) -> str:
        """Run the next command to its end."""
        command = [*self._next(east, west), *more]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            capture_output=True,
            text=True,
            env=self._environment,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def is_done(self) -> bool:
        return not self._commands


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()


async def until_copied(cluster: LiveCluster, history: History) -> None:
    async with cluster.client() as mq, asyncio.timeout(60):
        while True:
            known = {each.settings.name for each in await mq.metadata.list_subjects()}
            if {PLAIN, ORDERED} <= known:
                plain = [message.body async for message in mq.browse(PLAIN)]
                ordered = [message.body async for message in mq.browse(ORDERED)]
                if set(history.plain) <= set(plain) and {
                    body for mine in history.ordered.values() for body in mine
                } <= set(ordered):
                    return
            await asyncio.sleep(0.2)


@pytest.mark.sampled
async def test_the_runbook_of_fail_over_and_fail_back_loses_nothing(
    cluster: LiveCluster, second: LiveCluster, history: History, tmp_path: Path
) -> None:
    runbook = Runbook(tmp_path / "state")
    plain: list[bytes] = []
    ordered: list[tuple[str, bytes]] = []

    async def handle(where: LiveCluster) -> None:
        async with where.client() as mq:
            plain.extend(body for _, body in await rest(mq, PLAIN, GROUP))
            ordered.extend(await rest(mq, ORDERED, GROUP))

    async with cluster.client() as east:
        await history.create_subjects(east)
        await history.send(east, 10)
    mirror = await asyncio.to_thread(runbook.start, cluster.server, second.server)
    await handle(cluster)
    await until_copied(second, history)
    stop(mirror)
    async with cluster.client() as east:
        await history.send(east, 3)  # the mirror has not copied these
    shown = json.loads(await runbook.run(cluster.server, second.server, "--json"))
    assert {each["subject"]: each["lag"] for each in shown}[PLAIN] == 3
    await cluster.stop()

    async with second.client() as west:
        await history.send(west, 5)
    await handle(second)

    back = LiveCluster(cluster.endpoint, cluster.namespace, cluster.folder, cluster.groups)
    async with running(back):
        await runbook.run(back.server, second.server)
        await handle(second)
        mirror = await asyncio.to_thread(runbook.start, back.server, second.server)
        async with second.client() as west:
            await history.send(west, 5)
        await handle(second)
        stop(mirror)
        await runbook.run(back.server, second.server)
        assert runbook.is_done
        before = len(plain)
        async with back.client() as east:
            await history.send(east, 2)
            stored = [message.body async for message in east.browse(PLAIN)]
        assert Counter(stored) == Counter(history.plain), "east has each message once"
        await handle(back)
        assert sorted(plain[before:]) == sorted(history.plain[-2:]), (
            "the group continues at its progress"
        )
    assert set(plain) == set(history.plain)
    tails = {key: mine[10:13] for key, mine in history.ordered.items()}
    for key, mine in history.ordered.items():
        got = [
            body
            for at, (found, body) in enumerate(ordered)
            if found == key and body not in [each for _, each in ordered[:at]]
        ]
        assert set(got) == set(mine)
        assert [body for body in got if body not in tails[key]] == [
            body for body in mine if body not in tails[key]
        ]
        assert [body for body in got if body in tails[key]] == tails[key], (
            "what came late is in its order"
        )
