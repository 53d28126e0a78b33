"""`qmq broker --shards 2`, with a real etcd and a real metaserver: docs/SHARDS.md."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qmq_coordination.etcd.process import EtcdProcess
from support import eventually, needs

import qmq

SHARDS = 2


class Role:
    """A process of `qmq`, and the lines that it prints."""

    def __init__(self, *words: str) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("QMQ_")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qmq.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        found = self.process.stdout.readline()
        assert found, self.process.communicate()[1]
        return found.rstrip("\n")

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; return the exit status and the output."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


class Sharded:
    """A broker of two shards, its metaserver and etcd."""

    def __init__(self, folder: Path, etcd: str) -> None:
        words = ("--etcd", etcd, "--metrics-port", "0")
        self.meta = Role("meta", *words, "--port", "0")
        self.server = self.meta.line().split("ready at ")[1].split()[0]
        place = (
            "--group",
            "g1",
            "--replica",
            "a",
            "--data",
            str(folder),
            "--data-port",
            "0",
            "--control-port",
            "0",
        )
        self.broker = Role("broker", *words, *place, "--shards", str(SHARDS))
        self.lines = [self.broker.line() for _ in range(SHARDS + 1)]

    def qmq(self, *words: str) -> Any:
        """A command of an operator's, as JSON."""
        done = subprocess.run(
            [sys.executable, "-m", "qmq.cli", *words, "--json", "--server", self.server],
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    def shards(self) -> dict[str, int]:
        """The process id of each shard, by group."""
        found: dict[str, int] = {}
        children = (
            Path(f"/proc/{self.broker.process.pid}/task/{self.broker.process.pid}/children")
            .read_text()
            .split()
        )
        for child in map(int, children):
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            if "--group" in words:
                found[words[words.index("--group") + 1]] = child
        return found


@contextmanager
def sharded(folder: Path) -> Iterator[Sharded]:
    needs.need_etcd()
    etcd = EtcdProcess(folder / "etcd")
    roles: list[Role] = []
    try:
        etcd.start()
        found = Sharded(folder / "data", etcd.endpoint.removeprefix("http://"))
        roles = [found.broker, found.meta]
        yield found
    finally:
        for each in roles:
            if each.process.poll() is None:
                each.end(signal.SIGTERM)
        etcd.stop()


def is_gone(process: int) -> bool:
    """Whether a process is gone, or a zombie that was not waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def consumed(server: str, group: str, count: int) -> list[tuple[str, bytes]]:
    async with qmq.connect(server) as mq, mq.consumer("orders", group) as consumer:
        found: list[tuple[str, bytes]] = []
        async for message in consumer:
            found.append((message.broker_group, message.body))
            if len(found) == count:
                return found
    raise AssertionError


async def test_shards_share_a_subject_and_one_that_is_killed_comes_back(tmp_path: Path) -> None:
    with sharded(tmp_path) as it:
        assert it.lines[-1] == "qmq broker: 2 shards of g1 are ready"
        assert {
            found[1] for line in it.lines if (found := re.search(r"replica a of (\S+),", line))
        } == {"g1.1", "g1.2"}
        bodies: list[bytes] = []
        async with (
            qmq.connect(it.server) as mq,
            mq.producer("orders", batch_messages=10) as producer,
        ):

            async def send(count: int) -> None:
                more = [b"%d" % number for number in range(len(bodies), len(bodies) + count)]
                bodies.extend(more)
                await producer.send_many(more)

            async with asyncio.timeout(60):
                # a shard may have no master yet, and the client hears of it when it has
                while len(producer.stored_by_group) < SHARDS:
                    await send(500)
            victim = it.shards()["g1.2"]
            os.kill(victim, signal.SIGKILL)
            await send(2_000)
        assert await asyncio.to_thread(it.broker.line), "the killed shard serves again"
        assert it.shards()["g1.2"] != victim
        found = await consumed(it.server, "audit", len(bodies))
        assert sorted(body for _, body in found) == sorted(bodies)
        assert {group for group, _ in found} == {"g1.1", "g1.2"}, "both took their part"
        status, errors = await asyncio.to_thread(it.broker.end, signal.SIGTERM)
        assert (status, "Traceback" in errors) == (0, False), errors


async def test_operators_name_the_broker_and_mean_its_shards(tmp_path: Path) -> None:
    with sharded(tmp_path) as it:
        async with qmq.connect(it.server) as mq:
            await mq.send("orders", b"0")
        drained = it.qmq("broker", "drain", "g1")
        assert [(each["group"], each["to"]) for each in drained] == [
            ("g1.1", "read-only"),
            ("g1.2", "read-only"),
        ]
        resumed = it.qmq("broker", "resume", "g1")
        assert [(each["group"], each["from"]) for each in resumed] == [
            ("g1.1", "read-only"),
            ("g1.2", "read-only"),
        ]
        assert it.qmq("subject", "place", "orders", "--groups", "g1.2")[0]["to"] == "g1.2"
        assert it.qmq("subject", "place", "orders", "--groups", "g1")[0]["to"] == "g1.1,g1.2"


async def test_no_shard_outlives_its_supervisor(tmp_path: Path) -> None:
    with sharded(tmp_path) as it:
        shards = it.shards()
        assert set(shards) == {"g1.1", "g1.2"}
        it.broker.end(signal.SIGKILL)
        await eventually(lambda: all(map(is_gone, shards.values())))


def test_options_that_are_wrong_end_all_shards_with_their_status(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("a file, where the shards' folders belong")
    words = (
        "--group",
        "g1",
        "--replica",
        "a",
        "--data",
        str(data),
        "--etcd",
        "127.0.0.1:1",
        "--data-port",
        "0",
        "--control-port",
        "0",
    )
    status, errors = _ended(Role("broker", *words, "--shards", "2"))
    assert status == 1
    assert re.search(r"error: .*File exists(.|\n)*shard \d of g1 ended with status 1", errors), (
        errors
    )


def _ended(role: Role) -> tuple[int, str]:
    _, errors = role.process.communicate(timeout=60)
    return role.process.returncode, errors
