"""Objects of the tier that are damaged or hostile: a consumer is told the object's name, and other
subjects are served.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiered_log import SOON, bodies, log_config, until_cold, until_damage

from qmq.testing import TestCluster


def flipped(path: Path, _: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:99] + bytes([data[99] ^ 1]) + data[100:])


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


SPOILS: dict[str, Callable[[Path, Path], object]] = {
    "cut": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path, _: path.write_bytes(b""),
    "flipped": flipped,
    "deep": lambda path, _: path.write_bytes(b'{"a":' * 100_000),
    "huge": lambda path, _: os.truncate(path, 1 << 40),
    "other-segment": lambda path, other: path.write_bytes(other.read_bytes()),
    "link-outside": lambda path, _: linked(path),
}


@pytest.mark.parametrize("spoil", SPOILS)
async def test_a_hostile_chunk_is_named_and_other_subjects_are_served(
    tmp_path: Path, spoil: str
) -> None:
    sent, objects = bodies(30), tmp_path / "objects"
    async with TestCluster(delay=False, log=log_config(objects)) as cluster:
        mq = cluster.client()
        for subject in ("s", "neighbour"):
            for body in sent:
                await mq.send(subject, body)
        await until_cold(cluster)
        chunks = sorted(objects.glob("*/message/*/000000"))
        SPOILS[spoil](chunks[2], chunks[3])
        name = str(chunks[2].relative_to(objects))
        got, end = await until_damage(mq, name, [])
        assert got == sent[: len(got)]
        await mq.metadata.reset_group("s", "g", sequence=end)
        for subject, wanted in (("s", sent[end:]), ("neighbour", sent)):
            consumer, found = mq.consumer(subject, group="g"), list[bytes]()
            while len(found) < len(wanted):
                found += [message.body for message in await consumer.pull(50, SOON)]
            assert found == wanted
