"""Writing many and large buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.limits import KIB
from qmq.log.disk import WRITE_BYTES_MAX, Disk, chunks_of

IOV_MAX = 1024


@given(
    st.lists(
        st.sampled_from([0, 1, 64, 100 * KIB, 512 * KIB, 512 * KIB + 1, 1_300 * KIB]), max_size=8
    ),
    st.sampled_from([0, 1, 1023, 2100]),
)
def test_chunks_have_all_bytes_in_order_and_a_bounded_size(sizes: list[int], small: int) -> None:
    buffers = [bytes([at]) * size for at, size in enumerate(sizes)]
    buffers[1:1] = [b"s"] * small
    chunks = [list(each) for each in chunks_of(buffers)]
    assert b"".join([b"".join(each) for each in chunks]) == b"".join(buffers)
    assert all(sum(map(len, each)) <= WRITE_BYTES_MAX and len(each) <= IOV_MAX for each in chunks)


@pytest.mark.parametrize("sizes", [[64, 5_000_000], [300_000] * 5, [10] * 3_000])
def test_what_is_written_can_be_read(sizes: list[int], tmp_path: Path) -> None:
    disk = Disk()
    buffers = [bytes([at % 251]) * size for at, size in enumerate(sizes)]
    fd = disk.open_append(tmp_path / "segment")
    disk.write(fd, [b"before"], 0)
    disk.write(fd, buffers, 6)
    assert disk.read(fd, 10_000_000, 0) == b"before" + b"".join(buffers)
    disk.close(fd)
