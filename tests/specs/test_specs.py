"""TLC explores the specifications of replication, ordered messages and steps, and finds what
planted mistakes break (docs/JUDGES.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.model_checker import (
    ORDERING,
    PLANTED,
    REPLICATION,
    STEPS,
    Mistake,
    Model,
    check,
    is_there,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.sampled,
    pytest.mark.skipif(not is_there(), reason="needs Java, and TLC: scripts/judges"),
]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(REPLICATION, id="replication"),
        pytest.param(ORDERING, id="ordering"),
        pytest.param(STEPS, id="steps"),
    ],
)
def test_a_specification_holds_in_every_state_of_a_small_model(
    model: Model, tmp_path: Path
) -> None:
    verdict = check(model, tmp_path)
    assert verdict.violated is None, verdict.output[-4000:]


@pytest.mark.parametrize(
    ("model", "mistake"), [pytest.param(*each, id=each[1].name) for each in PLANTED]
)
def test_a_planted_mistake_is_found(model: Model, mistake: Mistake, tmp_path: Path) -> None:
    verdict = check(model.within(**mistake.limits), tmp_path, text=mistake.made_in(model.text))
    assert (verdict.violated, verdict.steps) == (mistake.breaks, mistake.steps)
