"""Each planted bug replaces something of the product, for as long as the process lives."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pyspark_qmq.sink.row_identity
import pyspark_qmq.stream  # noqa: F401 - bugs of drivers change what is imported
import pytest

from campaign import table

PRODUCT = ("qmq.", "qmq_coordination.", "qmq_replication.", "qmq_ordering.", "pyspark_qmq.")


def surface() -> dict[tuple[int, str], tuple[Any, Any]]:
    """(owner, value) of each name of the product's modules and classes; of a table its content."""
    modules = [each for name, each in sys.modules.items() if name.startswith(PRODUCT)]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if issubclass(type(value), type) and f"{value.__module__}.".startswith(PRODUCT)
    ]
    return {
        (id(owner), name): (owner, dict(value) if name.isupper() and type(value) is dict else value)
        for owner in (*modules, *classes)
        for name, value in vars(owner).items()
        if not name.startswith("__")
    }


def is_same(before: Any, after: Any) -> bool:
    if type(before) is dict and type(after) is dict:
        return before.keys() == after.keys() and all(before[key] is after[key] for key in before)
    return before is after


def restore(owner: Any, name: str, value: Any) -> None:
    found = vars(owner).get(name)
    if type(value) is dict and type(found) is dict:
        found.clear()
        found.update(value)
    else:
        setattr(owner, name, value)


@pytest.mark.parametrize("name", list(table.bugs()))
def test_a_planted_bug_stays_in_the_product(name: str) -> None:
    before = surface()
    table.bugs()[name].plant()
    gc.collect()
    changed = [
        (owner, each, value)
        for (_, each), (owner, value) in before.items()
        if not is_same(value, vars(owner).get(each))
    ]
    for owner, each, value in changed:
        restore(owner, each, value)
    assert changed
