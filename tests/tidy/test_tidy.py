"""Style as a test: what a linter does not know about this project."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 610
PACKAGES = ("qmq", "coordination", "replication", "ordering", "spark")
HOSTS = ("py" + "pi\\.org", "python" + "hosted")
LEFTOVERS = (r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", "pick" + r"le\.", "shell=" + "True")
FORBIDDEN = re.compile("|".join(["/wo" + "rk/", "/ro" + "ot/", *HOSTS, *LEFTOVERS]))


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.decode().splitlines() if (ROOT / name).is_file()]


SOURCES = [path for path in tracked() if path.suffix == ".py" and "_pb2" not in path.name]
CODE = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
DOCS = [path for path in tracked() if path.suffix == ".md"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_module_teaches_and_stays_small() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{name(path)} has no docstring"
        assert text.count("\n") <= LINES_MAX or "tests" in path.parts, f"{name(path)} is too long"


def test_what_is_public_is_documented() -> None:
    """Actions and errors are explained in their module's table and tree."""
    for path in CODE:
        for node in ast.parse(path.read_text()).body:
            is_public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
            if is_public and path.name not in ("actions.py", "errors.py"):
                assert ast.get_docstring(node), f"{name(path)}: {node.name} has no docstring"


def test_no_machine_host_or_leftover_is_named() -> None:
    for path in tracked():
        if path.suffix in (".py", ".md", ".toml", ".lock", ".proto", "") and path.stat().st_size < 1_000_000 and path.name != "LICENSE":
            found = FORBIDDEN.search(path.read_text(errors="replace"))
            assert found is None or "_pb2" in path.name, f"{name(path)}: {found and found[0]}"


def test_a_document_has_one_title() -> None:
    for path in DOCS:
        body = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        assert len(re.findall(r"^# ", body, re.MULTILINE)) == 1, name(path)


REPLAYED = re.compile(r"qmq/log/|qmq/delay/schedule|replication/qmq_replication/")
"""What replicas run alike on what is stored."""


def test_no_assert_guards_what_all_replicas_do_alike() -> None:
    """One would end all of them at the same entry, and none of them under `-O`: qmq.invariants says what is meant."""
    replayed = [path for path in CODE if REPLAYED.match(name(path))]
    nodes = [(path, node) for path in replayed for node in ast.walk(ast.parse(path.read_text()))]
    found = [f"{name(path)}:{node.lineno}" for path, node in nodes if isinstance(node, ast.Assert)]
    assert replayed
    assert not found, found
