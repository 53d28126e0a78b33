"""Members of etcd whose files are damaged: what one or two of three cannot take away, and what says
that etcd is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from qmq_coordination.etcd.store import EtcdStore
from support import eventually
from support.etcd_process import EtcdCluster, EtcdProcess
from support.stores import put_surely

from qmq.errors import CoordinationUnavailable, CoordinationUnknown

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("etcd-damage")]


def files(member: EtcdProcess, pattern: str) -> list[Path]:
    found = sorted((member.folder / "data" / "member").glob(pattern))
    assert found
    return found


def flip(member: EtcdProcess) -> None:
    """A bit of an entry in the write-ahead log."""
    path = files(member, "wal/*.wal")[0]
    data = bytearray(path.read_bytes())
    data[len(data.rstrip(b"\0")) // 2] ^= 4
    path.write_bytes(data)


def cut(member: EtcdProcess) -> None:
    """The database loses its second half."""
    path = files(member, "snap/db")[0]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 // 4096 * 4096)


def lose(member: EtcdProcess) -> None:
    """The pages of the write-ahead log's last half."""
    path = files(member, "wal/*.wal")[0]
    data = path.read_bytes()
    kept = len(data.rstrip(b"\0")) // 2
    path.write_bytes(data[:kept] + bytes(len(data) - kept))


HARMS: list[Callable[[EtcdProcess], None]] = [flip, cut, lose]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
async def test_damaged_members_remove_no_value_that_an_undamaged_majority_has(
    etcd_cluster: EtcdCluster, harm: Callable[[EtcdProcess], None], count: int
) -> None:
    store = EtcdStore(etcd_cluster.endpoints, namespace="/damage/", total_s=8)
    try:
        for number in range(200):
            revision = await put_surely(store, f"key/{number}", b"%d" % number)
        # A member that lags would not count to an undamaged majority.
        for member in etcd_cluster.members:
            await eventually(partial(has, member, revision), within_s=30)
        for member in etcd_cluster.members[:count]:
            member.kill()
        for member in etcd_cluster.members[:count]:
            harm(member)
            member.spawn()
        if count == 1:
            await put_surely(store, "after", b"")
            assert [await value_surely(store, number) for number in range(200)] == [
                b"%d" % number for number in range(200)
            ]
            return
        with suppress(CoordinationUnavailable, CoordinationUnknown):
            await store.put("after", b"")  # if etcd judges its files whole, they are
            assert [await value(store, number) for number in range(200)] == [
                b"%d" % number for number in range(200)
            ]
    finally:
        await store.close()


async def has(member: EtcdProcess, revision: int) -> bool:
    """Whether a member itself has this revision."""
    store = EtcdStore([member.endpoint])
    try:
        return (await store.status()).revision >= revision
    except CoordinationUnavailable:
        return False
    finally:
        await store.close()


async def value_surely(store: EtcdStore, number: int) -> bytes | None:
    """The value, through elections of any length."""
    found: list[bytes | None] = []

    async def is_read() -> bool:
        with suppress(CoordinationUnavailable):
            found.append(await value(store, number))
        return bool(found)

    await eventually(is_read, within_s=60)
    return found[0]


async def value(store: EtcdStore, number: int) -> bytes | None:
    found = await store.get(f"key/{number}")
    return None if found is None else found.value
