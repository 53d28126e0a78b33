"""The example data equals the original, byte for byte."""

from __future__ import annotations

import hashlib

import pytest
from flights import ROWS, SHA256, csv_text, flights


@pytest.mark.longest
@pytest.mark.sampled
def test_the_compact_form_gives_back_the_original_table() -> None:
    assert hashlib.sha256(csv_text().encode()).hexdigest() == SHA256
    rows = list(flights())
    assert len(rows) == ROWS
    assert all(row.carrier in row.line and row.tail_number in row.line for row in rows)
