"""Every cell of the matrix ends as the table says, and nothing that was reported as flushed is lost in silence."""

from __future__ import annotations

import pytest
from support import forms

from damage.cells import Beside, Cell, Damage, End, Kind, cells
from damage.run import EIO, prepared

EVERY = list(cells())
PARTS = {"gate": 96, "ci": 16, "all": 1}[forms.FORM]
"""The gate has a few cells, each run others."""
MESSAGES_IN_A_BLOCK = 3
SMOKE = [
    Cell(Kind.MESSAGES, Damage.FLIP, 3, Beside.KILL),
    Cell(Kind.CONSUME, Damage.FLIP, 3, Beside.PAUSE),
    Cell(Kind.SCHEDULE, Damage.UNREADABLE, 1, Beside.CUT_OFF),
]
CHOSEN = [cell for number, cell in enumerate(EVERY) if cell in SMOKE or number % PARTS == forms.SEED % PARTS]


@pytest.mark.parametrize("cell", CHOSEN, ids=str)
async def test_the_cell_ends_as_the_table_says(cell: Cell) -> None:
    async with prepared(cell) as run:
        await run.fault()
        found = await run.judge()
        assert not found.unknown
        assert cell.allows(found.end), found
        if found.end is not End.PARTLY and found.is_served:
            assert not found.lost
        elif cell.kind is Kind.MESSAGES and found.end is End.PARTLY:
            assert len(found.lost) <= MESSAGES_IN_A_BLOCK
        if found.refusals:
            assert all("E401" in each or EIO in each for each in found.refusals.values())
            assert (await run.recovered()).end is End.WHOLE
