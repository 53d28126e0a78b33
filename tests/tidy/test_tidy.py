"""Style as a test: what a linter does not know about this project."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 1_000
PACKAGES = ("qmq", "coordination", "replication", "ordering", "spark")
# One worker, so that each file is parsed once.
pytestmark = pytest.mark.xdist_group("tidy")
HOSTS = ("py" + "pi\\.org", "python" + "hosted")
LEFTOVERS = (r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", "pick" + r"le\.", "shell=" + "True")
FORBIDDEN = re.compile("|".join(["/wo" + "rk/", "/ro" + "ot/", *HOSTS, *LEFTOVERS]))


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.decode().splitlines() if (ROOT / name).is_file()]


SOURCES = [path for path in tracked() if path.suffix == ".py" and "_pb2" not in path.name]
CODE = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
DOCS = [path for path in tracked() if path.suffix == ".md"]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_module_teaches_and_stays_small() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert re.match(r'(#.*\n)*r?"""', text), f"{name(path)} has no docstring"
        assert text.count("\n") <= LINES_MAX or "tests" in path.parts, f"{name(path)} is too long"


NAME_CHARS_MAX = 80


def test_names_of_tests_are_short_enough_to_read() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tests = [
        (path, node.name) for path in SOURCES for node in nodes(path) if isinstance(node, functions)
    ]
    assert [
        f"{name(path)}: {each}"
        for path, each in tests
        if each.startswith("test_") and len(each) > NAME_CHARS_MAX
    ] == []


SIMULATORS = re.compile(r"tests/(sim|ordersim|delaysim|specs)/|tests/.*/bugs")
"""Subclasses of the product that plant bugs, or record its steps."""
OF_NAMED_TUPLES = {"_replace", "_asdict", "_make", "_fields"}
OF_LIBRARIES = {"_exit", "_outer_config", "_build_fastdepends_model", "_protected_args"}
"""Of the module os, FastStream and click."""


def is_private(node: ast.AST) -> bool:
    """Whether it takes a private attribute of anything but `self`, `cls` or `super()`."""
    if (
        not isinstance(node, ast.Attribute)
        or not re.match(r"_(?!_)", node.attr)
        or node.attr in OF_NAMED_TUPLES | OF_LIBRARIES
    ):
        return False
    owner = node.value.func if isinstance(node.value, ast.Call) else node.value
    return getattr(owner, "id", "") not in ("self", "cls", "super")


def test_tests_touch_no_private_attribute() -> None:
    """A test says a promise through what anybody may ask, or through its effect. So a helper of
    tests names in public what they use.
    """
    paths = [
        path
        for path in SOURCES
        if name(path).startswith("tests/") and not SIMULATORS.match(name(path))
    ]
    found = [
        f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in paths
        for node in nodes(path)
        if is_private(node)
    ]
    assert len(paths) > 500
    assert found == []


FACES = (
    "qmq/__init__.py",
    "qmq/sql/__init__.py",
    "qmq/testing/__init__.py",
    "qmq/metrics/__init__.py",
    "spark/pyspark_qmq/__init__.py",
)
"""The modules that applications import. The names in their `__all__` are public."""


def definitions() -> list[tuple[Path, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [(path, node) for path in CODE for node in nodes(path) if isinstance(node, kinds)]


def public_names() -> set[str]:
    found = set()
    for face in FACES:
        for node in ast.parse((ROOT / face).read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                found |= set(ast.literal_eval(node.value))
    return found


def test_what_applications_import_is_documented() -> None:
    """Includes the methods of classes. Errors are explained in their tree."""
    public, seen = public_names(), set()
    for path, node in definitions():
        if node.name not in public or node.col_offset or path.name == "errors.py":
            continue
        seen.add(node.name)
        # a base without effect is explained by its protocol
        is_class = isinstance(node, ast.ClassDef) and not node.name.startswith("Base")
        parts = node.body if is_class else []
        methods = [
            each
            for each in parts
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            and not each.name.startswith("_")
        ]
        for each in [node, *methods]:
            assert ast.get_docstring(each) or _is_overload(each), (
                f"{name(path)}: {node.name}, {each.name} has no docstring"
            )
    assert {"connect", "Client", "Message", "TestCluster"} <= seen


def _is_overload(node: ast.AST) -> bool:
    return any(
        getattr(each, "id", "") in ("overload", "setter")
        for each in getattr(node, "decorator_list", ())
    )


def test_a_docstring_says_more_than_where_to_look() -> None:
    for path, node in definitions():
        text = ast.get_docstring(node) or ""
        assert not re.match(r"See the module\b", text), f"{name(path)}: {node.name}"


NAMED_FILE = re.compile(r"[\w/]+\.(?:py|proto|md)\b")
EXAMPLE_FILES = {"test_it.py", "manage.py"}
"""Files of an example in a docstring, and of every Django project."""


def test_files_that_docstrings_and_pages_name_exist() -> None:
    """Names, and paths where one is given. The changelog and the decisions are left out, because
    they describe the past.
    """
    files = [name(path) for path in tracked()]
    known = {
        ending
        for file in files
        for ending in (
            file,
            *("/".join(file.split("/")[n:]) for n in range(1, file.count("/") + 1)),
        )
    }
    texts = {
        name(path): [
            ast.get_docstring(node) or "" for node in nodes(path) if isinstance(node, DOCUMENTED)
        ]
        for path in SOURCES
    }
    past = re.compile(r"CHANGELOG|docs/adr/")
    texts |= {
        name(path): re.findall(r"`[^`\n]+`", path.read_text())
        for path in DOCS
        if not past.search(name(path))
    }
    found = {
        (file, each)
        for file, parts in texts.items()
        for text in parts
        for each in NAMED_FILE.findall(text)
    }
    assert (
        sorted((file, each) for file, each in found if each.strip("/") not in known | EXAMPLE_FILES)
        == []
    )


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHARED_NAMES = {"Command", "Migration", "QmqBroker"}
"""What Django looks for by this name, and the name that both Taskiq and FastStream expect of a
broker.
"""


def test_no_two_classes_share_a_name() -> None:
    classes = Counter(
        node.name for path in CODE for node in parsed(path).body if isinstance(node, ast.ClassDef)
    )
    found = {each for each, count in classes.items() if count > 1}
    assert found <= SHARED_NAMES, sorted(found - SHARED_NAMES)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    found = parts if parts[0] == "qmq" else parts[1:]
    return ".".join(found[:-1] if found[-1] == "__init__" else found)


def imports_of(found_in: Iterable[ast.AST], known: Container[str]) -> set[str]:
    """The imports of our packages among these statements."""
    found: set[str] = set()
    for node in found_in:
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                full if (full := f"{node.module}.{each.name}") in known else node.module
                for each in node.names
            }
    return {each for each in found if each in known}


def circles_in(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """The modules that are in a circle or import one, and what of that they import. Imports of a
    module by itself are none.
    """
    left = {name: imported - {name} for name, imported in graph.items()}
    while leaves := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in leaves:
            del left[name]
    return {name: sorted(imported & left.keys()) for name, imported in left.items()}


def test_no_imports_run_in_a_circle() -> None:
    """All imports: at the top, in functions, and for types only."""
    paths = {module_of(path): path for path in CODE}
    assert circles_in({name: imports_of(nodes(path), paths) for name, path in paths.items()}) == {}


def run_at_import(path: Path) -> Iterator[ast.AST]:
    """The statements that run when the module is imported, without imports for types."""
    left: list[ast.AST] = list(parsed(path).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            left += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            left += ast.iter_child_nodes(node)
        else:
            yield node


def packages_above(module: str) -> set[str]:
    return {module.rsplit(".", count)[0] for count in range(1, module.count(".") + 1)}


def test_each_module_can_be_the_first_one_imported() -> None:
    """An import of `a.b` runs the package `a`, too. If `a` then imports the importing module, that
    module is incomplete. Modules of `a` itself never do that: `a` runs before them.
    """
    paths = {module_of(path): path for path in CODE}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported = imports_of(run_at_import(path), paths)
        graph[name] = imported.union(*map(packages_above, imported)) - packages_above(name)
    assert circles_in(graph) == {}


def test_no_machine_host_or_leftover_is_named() -> None:
    for path in tracked():
        if (
            path.suffix in (".py", ".md", ".toml", ".lock", ".proto", "")
            and path.stat().st_size < 1_000_000
            and path.name != "LICENSE"
        ):
            found = FORBIDDEN.search(path.read_text(errors="replace"))
            assert found is None or "_pb2" in path.name, f"{name(path)}: {found and found[0]}"


WORDS = (
    "an" + "ew",
    "ali" + "ke",
    "in ha" + "nd",
    "counts no mo" + "re",
    "believe" + "[sd]",
    r"(goes|went) o" + r"n(?! (the|its)\b)",
)
TURNS = (
    "what" + "ever",
    "who" + "ever",
    "told " + "again",
    r"an? [\w'-]+ of (its|their) ow" + "n(?! \\w)",
)
PRIVATE_WORDS = re.compile(rf"\b({'|'.join((*WORDS, *TURNS))})\b")
"""Words that a reader has to translate (docs/STYLE.md): again, the same way, in progress,
continues, accepts, no longer counts; for any, the one that, repeated, its own.
"""


def test_prose_uses_plain_words() -> None:
    for path in [*SOURCES, *DOCS]:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            found = PRIVATE_WORDS.search(line)
            assert found is None, (
                f"{name(path)}:{number}: say {found and found[0]!r} in plain words"
            )


RIDDLES = re.compile(
    r"nobody|who" + r"ever|somebody|(becomes|became)_of|_(is|are)_said(_|$)|_an" + "ew"
)
"""Parts of names that a reader has to translate: name who does it, and what is reported."""


def test_names_of_tests_are_plain() -> None:
    tests = [
        (path, test)
        for path in SOURCES
        for test in re.findall(r"def (test_\w+)\(", path.read_text())
    ]
    assert len(tests) > 3000
    assert [f"{name(path)}: {test}" for path, test in tests if RIDDLES.search(test)] == [], (
        "say it in plain words"
    )


def test_a_document_has_one_title() -> None:
    for path in DOCS:
        body = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        assert len(re.findall(r"^# ", body, re.MULTILINE)) == 1, name(path)


REPLAYED = re.compile(r"qmq/log/|qmq/delay/schedule|replication/qmq_replication/")
"""Code that every replica runs on the same stored entries."""


def test_no_assert_guards_what_every_replica_replays() -> None:
    """An assert would end all replicas at the same entry, and none of them under `-O`: see
    qmq.errors.
    """
    replayed = [path for path in CODE if REPLAYED.match(name(path))]
    found = [
        f"{name(path)}:{node.lineno}"
        for path in replayed
        for node in nodes(path)
        if isinstance(node, ast.Assert)
    ]
    assert replayed
    assert not found, found
