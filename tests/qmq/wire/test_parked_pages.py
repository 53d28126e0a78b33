"""Parked keys in portions: each fits into a message between servers, and together they are all
keys.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from qmq_ordering.routes import LpRange

from qmq.limits import KEY_BYTES_MAX, KIB, PARKED_PAGE_BYTES
from qmq.proto.v1 import control_pb2 as control
from qmq.wire.parked_pages import by_ranges, first_page

LPS = LpRange(3, 40)
KEYS = st.lists(
    st.tuples(
        st.integers(LPS.first, LPS.end - 1), st.integers(1, KEY_BYTES_MAX), st.integers(1, 300)
    ),
    max_size=12,
)
"""(logical partition, length, number of keys)."""


def parked(found: list[tuple[int, int, int]]) -> list[control.ParkedKey]:
    return [
        control.ParkedKey(
            partition=7,
            logical_partition=lp,
            key=b"%04d" % at + bytes(length),
            messages=1 << 40,
            first_sequence=1 << 60,
        )
        for at, (lp, length, count) in enumerate(found)
        for _ in range(count)
    ]


@given(KEYS)
def test_ranges_of_parked_keys_fit_into_requests_and_cover_everything_once(
    found: list[tuple[int, int, int]],
) -> None:
    keys = parked(found)
    pieces = list(by_ranges(LPS, keys))
    assert (pieces[0][0].first, pieces[-1][0].end) == LPS
    assert all(before.end == after.first for (before, _), (after, _) in pairwise(pieces))
    assert sorted(each.key for _, held in pieces for each in held) == sorted(
        each.key for each in keys
    )
    for lps, held in pieces:
        assert all(lps.first <= each.logical_partition < lps.end for each in held)
        is_one = len({each.logical_partition for each in held}) == 1
        assert is_one or control.InheritParkedRequest(keys=held).ByteSize() <= PARKED_PAGE_BYTES


@given(KEYS)
def test_a_page_has_the_first_keys_as_many_as_fit(found: list[tuple[int, int, int]]) -> None:
    keys = parked(found)
    page = list(first_page(keys, PARKED_PAGE_BYTES))
    assert page == keys[: len(page)]
    size = control.DescribeParkedResponse(keys=page).ByteSize()
    assert size <= PARKED_PAGE_BYTES
    assert len(page) == len(keys) or size > PARKED_PAGE_BYTES - 2 * KEY_BYTES_MAX - 8 * KIB
