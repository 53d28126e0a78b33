"""What `import qmq` gives, and that the order of imports does not matter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qmq

ROOT = Path(qmq.__file__).resolve().parents[1]
BELOW = ("ordering/qmq_ordering", "coordination/qmq_coordination", "replication/qmq_replication")
IMPORT_EACH = """
import os, sys
from importlib import import_module

for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            import_module(name)
        except BaseException as failure:
            print(name, repr(failure), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def for_type_checkers() -> set[str]:
    """The names that qmq/__init__.py imports for type checkers."""
    body = ast.parse(Path(qmq.__file__).read_text()).body
    block = next(
        node
        for node in body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {
        each.asname or each.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }


def test_type_checkers_and_programs_find_the_same_names_in_qmq() -> None:
    # types of parameters of `connect`
    names = for_type_checkers() - {
        "StateDir",
        "Token",
        "timedelta",
    }
    assert names | {"connect"} == {*qmq.__all__, "blocking"}
    found = {name: getattr(qmq, name) for name in names}
    assert found.pop("payload").__name__ == "qmq.client.payloads"
    assert {name: each.__name__.split(".")[-1] for name, each in found.items()} == {
        name: name for name in found
    }


def test_a_name_that_qmq_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'qmq' has no attribute 'Konsumer'"):
        _ = qmq.Konsumer


@pytest.mark.sampled
@pytest.mark.parametrize("package", BELOW)
def test_each_module_of_a_package_below_the_client_can_be_imported_first(package: str) -> None:
    """In an interpreter that has imported nothing of ours; tests/tidy examines the imports of all
    packages as a graph.
    """
    folder = ROOT / package
    files = [
        each.relative_to(folder.parent).with_suffix("") for each in sorted(folder.rglob("*.py"))
    ]
    modules = [".".join(each.parts).removesuffix(".__init__") for each in files]
    made = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *modules],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert len(modules) > 5
    assert made.stdout == ""
