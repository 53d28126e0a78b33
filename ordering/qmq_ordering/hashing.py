"""Maps a key to its logical partition. Every client in every language must compute the same result,
bit for bit.

    h = crc32c(key)                    Castagnoli, reflected, as in RFC 3720 (iSCSI); the check
                                       value of b"123456789" is 0xE3069283
    m = (h * 2654435769) mod 2^32      2654435769 = floor(2^32 / golden ratio): Knuth, TAOCP 6.4,
                                       multiplicative hashing
    LP = (m * N) >> 32                 the upper bits choose, so any N works, not only powers of two

A CRC alone is linear: the CRCs of keys that differ in one digit differ in a pattern. The
multiplication breaks this pattern.
"""

from __future__ import annotations

from typing import Final

from google_crc32c import value as crc32c  # type: ignore[import-untyped,unused-ignore]

LOGICAL_PARTITIONS: Final = 1024
"""The default of N, the number of logical partitions of a subject."""

_GOLDEN: Final = 2_654_435_769
_MASK: Final = 0xFFFF_FFFF


def logical_partition(key: bytes, count: int) -> int:
    """The logical partition of `key`, 0 to `count` - 1."""
    return ((int(crc32c(key)) * _GOLDEN & _MASK) * count) >> 32
