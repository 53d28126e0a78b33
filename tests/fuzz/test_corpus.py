"""Inputs that the fuzzer kept, and inputs that once raised an untyped error, lead to a result or a
typed error.
"""

from __future__ import annotations

import pytest

from fuzz.targets import FOLDER, TARGETS, counts, inputs_of, seeds_of

MENDED = (
    ("replica_messages", b"6\xa1\x95L&\xfc\xf3\xa3Z\xe3\x0f\xb7"),
    (
        "actions",
        b"\x94\x98\x0f\xb6A\x92\x08\xe1\xbeS\x0b\xf9'c\xbd$\xf4w\xb2\x8b4\x80\xc6\xdb\xb7\x9fP\x1aCrssAoW",
    ),
    ("actions", b"#"),
    ("checked_files", b"\x02\xd4"),
    ("checked_files", b"\x03\xfb\x83"),
    ("checked_files", b"\x04I\\"),
    ("checked_files", b"\x05O~"),
    (
        "backed_up_items",
        (
            b'\x96\x92\xb5\xe7\xbb\xb4\x92\t"\x9d\xa4\xf5\xd6\x94\xe7 '
            b"\xfd\xce\x98\x16<\x95\xdf$\xa3\x97\xff\xfb\x11\x08"
        ),
    ),
    ("dispatch_logs", b"\x01[ \x01\x00\x00\x00\x00\x02\x00\xf4\x02"),
    ("schedule_marks", b"\x91" * 2_000),
    ("settings", b"\x08l"),
    ("sends", b"\n\x07\x1a\x05\x1a\x01i0c"),
    (
        "regions",
        b"\x00\x00\xbe\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xf7\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00 "  # noqa: E501
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\x00\x08\x00\n",
    ),
)
"""Fuzzing found them: a UnicodeDecodeError, a struct.error, ValueErrors of protobuf and an enum,
errors of msgspec, a RecursionError.
"""


@pytest.mark.parametrize("name", TARGETS)
def test_what_fuzzing_kept_is_answered_by_a_value_or_a_typed_error(name: str) -> None:
    inputs = inputs_of(name) + seeds_of(name)
    assert inputs
    for data in inputs:
        TARGETS[name](data)


@pytest.mark.parametrize(
    ("name", "data"), MENDED, ids=[f"{number}-{name}" for number, (name, _) in enumerate(MENDED)]
)
def test_what_fuzzing_found_is_answered_by_a_value_or_a_typed_error(name: str, data: bytes) -> None:
    TARGETS[name](data)


def test_the_corpus_stays_small_and_is_counted() -> None:
    assert sum(each.stat().st_size for each in FOLDER.iterdir()) < 1 << 20
    assert set(counts()) <= set(TARGETS)
    assert sum(counts().values()) > 1_000_000
