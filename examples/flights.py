"""The flight data of the examples: every flight that left New York's three airports in 2013, one
row each (see data/README.md).

The file holds the table column by column, xz-compressed, three fifths of the zipped CSV; `rows`
gives back the CSV's own lines.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

DATA: Final = Path(__file__).parent / "data" / "flights.columns.xz"
ROWS: Final = 336_776
SHA256: Final = "563db8f117faf6ffd76aa868099df37dfa78dc17b5ac6d3d9ea6476e051a0bc4"
"""The checksum of the original CSV."""


class Flight(NamedTuple):
    """One row: `line` is the CSV line without its end."""

    line: str
    tail_number: str
    carrier: str


def pack(csv_text: str) -> bytes:
    """The compact form of a CSV without quotes: column after column."""
    table = [line.split(",") for line in csv_text.splitlines()]
    columns = ("\n".join(column) for column in zip(*table, strict=True))
    return lzma.compress("\0".join(columns).encode(), preset=9 | lzma.PRESET_EXTREME)


def columns() -> list[list[str]]:
    """The table's columns; the first item of each is its name."""
    return [
        column.split("\n") for column in lzma.decompress(DATA.read_bytes()).decode().split("\0")
    ]


def csv_text() -> str:
    """The original CSV, byte for byte."""
    return "\n".join(map(",".join, zip(*columns(), strict=True))) + "\n"


def flights() -> Iterator[Flight]:
    """Every flight, in the order of the file."""
    table = columns()
    tail_numbers = next(column for column in table if column[0] == "tailnum")
    carriers = next(column for column in table if column[0] == "carrier")
    lines = map(",".join, zip(*table, strict=True))
    found = zip(lines, tail_numbers, carriers, strict=True)
    next(found)
    for line, tail_number, carrier in found:
        yield Flight(line, tail_number, carrier)
