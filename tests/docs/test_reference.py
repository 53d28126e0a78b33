"""The reference pages in docs/reference are those that the code makes today."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import reference


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_of_the_reference_is_what_tools_reference_writes(name: str) -> None:
    committed = (reference.FOLDER / name).read_text()
    assert reference.PAGES[name]() == committed, (
        f"docs/reference/{name} is out of date: run tools/run reference"
    )
