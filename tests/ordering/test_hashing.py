"""The hash, bit for bit: vectors for clients in any language, an independent CRC, and how evenly
keys that count up are spread.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qmq_ordering.hashing import LOGICAL_PARTITIONS, logical_partition

VECTORS: list[tuple[bytes, int, int, int, int]] = [
    # key, its CRC-32C, and its logical partition of 1,000, 1,024 and 65,536
    (b"", 0x00000000, 0, 0, 0),
    (b"a", 0xC1D04330, 556, 570, 36498),
    (b"123456789", 0xE3069283, 496, 508, 32548),
    (b"N14228", 0xBA116027, 403, 413, 26465),
    ("Zürich".encode(), 0xF496E8F8, 197, 201, 12915),
    ("订单-42".encode(), 0xD7DE29DB, 161, 165, 10593),
    ("🛫".encode(), 0x6E335608, 322, 329, 21114),
    (b"\x00", 0x527D5351, 739, 757, 48473),
    (b"\x00" * 32, 0x8A9136AA, 438, 449, 28748),  # RFC 3720, B.4
    (b"\xff" * 32, 0x62A8AB43, 164, 168, 10811),  # RFC 3720, B.4
    (bytes(range(32)), 0x46DD794E, 94, 96, 6180),  # RFC 3720, B.4
    (b"k" * 4096, 0x5D890E29, 720, 738, 47243),
    (b"order-00000001", 0xFEF1B6B0, 358, 367, 23510),
    (b"order-00000002", 0xEDA14544, 800, 819, 52452),
    (b"\xff\xfe not text", 0x21E191DA, 983, 1007, 64456),
]


def bitwise_crc32c(data: bytes) -> int:
    """Castagnoli's polynomial, reflected, one bit at a time."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def from_the_specification(key: bytes, count: int) -> int:
    return (bitwise_crc32c(key) * 2654435769 % 2**32 * count) // 2**32


@pytest.mark.parametrize(("key", "crc", "of_1000", "of_1024", "of_65536"), VECTORS)
def test_the_vectors_hold(key: bytes, crc: int, of_1000: int, of_1024: int, of_65536: int) -> None:
    assert bitwise_crc32c(key) == crc
    assert [logical_partition(key, count) for count in (1000, 1024, 65_536)] == [
        of_1000,
        of_1024,
        of_65536,
    ]


def test_a_subject_has_1024_logical_partitions_unless_chosen() -> None:
    assert LOGICAL_PARTITIONS == 1024


@given(st.binary(max_size=80), st.integers(1, 65_536))
def test_any_key_is_where_the_specification_says(key: bytes, count: int) -> None:
    found = logical_partition(key, count)
    assert found == from_the_specification(key, count)
    assert 0 <= found < count


@given(st.binary(max_size=80), st.integers(1, 64), st.integers(1, 64))
def test_logical_partitions_of_a_multiple_refine_those_of_the_count(
    key: bytes, count: int, times: int
) -> None:
    """The upper bits choose: a property of the formula that another language's rounding would
    break.
    """
    assert logical_partition(key, count * times) // times == logical_partition(key, count)


@pytest.mark.parametrize("pattern", ["order-{:08}", "{}", "user:{}:cart", "{:x}", "DE{:010}X"])
@pytest.mark.parametrize("count", [7, 1000, 1024])
def test_keys_that_count_up_are_spread_evenly(pattern: str, count: int) -> None:
    """Chi-square over 50,000 keys: within four standard deviations of a uniform distribution. The
    sample is fixed, and so is the result.
    """
    keys = 50_000
    found = Counter(logical_partition(pattern.format(i).encode(), count) for i in range(keys))
    expected = keys / count
    chi_square = sum((found[lp] - expected) ** 2 / expected for lp in range(count))
    freedom = count - 1
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5
