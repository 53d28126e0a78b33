"""Every program and command of the tutorial and of the README runs, and prints what the page
shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import NodeProcess
from support.code_blocks import blocks_of, is_shown, require_shown

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for page in sorted((ROOT / "docs" / "tutorial").glob("*.md"))
    if page.name not in ("README.md", "spark.md")
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One node for all pages, started as the tutorial says. Each page has its own subjects."""
    node = NodeProcess(tmp_path_factory.mktemp("node"))
    yield node.start()
    node.kill()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "page",
    [pytest.param(ROOT / "README.md", marks=pytest.mark.smoke), *PAGES],
    ids=lambda page: page.stem,
)
def test_what_a_page_shows_is_what_its_code_prints(
    page: Path, address: str, tmp_path: Path
) -> None:
    require_shown(page, address, tmp_path)


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *PAGES, ROOT / "docs" / "tutorial" / "spark.md"],
    ids=lambda page: page.stem,
)
def test_no_code_of_a_page_is_left_out(page: Path) -> None:
    text, blocks = page.read_text(), list(blocks_of(page))
    assert sum(each.language in ("python", "file") for each in blocks) == text.count("```python")
    assert sum(each.language == "console" for each in blocks) == text.count("\n$ ")
    assert blocks


FENCES = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
TRANSLATED = [*PAGES, ROOT / "docs" / "tutorial" / "spark.md"]


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.stem)
def test_the_chinese_tutorial_has_the_same_code(page: Path) -> None:
    translated = ROOT / "docs" / "zh" / "tutorial" / page.name
    assert FENCES.findall(translated.read_text()) == FENCES.findall(page.read_text())


GENERATED = {"METRICS.md": "metrics.md", "OPERATIONS.md": "findings.md"}
"""Chinese pages that end with a translation of a table, and the page of the reference that has it
in English.
"""
CHINESE = sorted(
    page.name for page in (ROOT / "docs" / "zh").glob("*.md") if page.name != "README.md"
)


@pytest.mark.parametrize("name", CHINESE)
def test_a_chinese_page_has_the_english_page_s_code_in_its_order(name: str) -> None:
    """Some Chinese pages refer to the English page for some parts. Complete pages are compared
    below.
    """
    code, translated = (
        FENCES.findall((ROOT / "docs" / folder / name).read_text()) for folder in ("", "zh")
    )
    rest = iter(code)
    assert [each for each in translated if each not in rest] == []


@pytest.mark.parametrize(
    "name",
    [
        "LISTENERS.md",
        "DELIVERY.md",
        "OUTBOX.md",
        "CLI.md",
        "BROWSE.md",
        "TRANSFER.md",
        "ORDERING.md",
        "DELAY.md",
        "RUNBOOKS.md",
        "LAKE.md",
        "UPGRADES.md",
        "SIZING.md",
        "KUBERNETES.md",
        "SPARK.md",
        "CONTRACT.md",
        "SECURITY.md",
        "OPERATIONS.md",
        "ROCKETMQ.md",
        "DEPLOY.md",
        "DEDUP.md",
        "TESTING.md",
        "CONSOLE.md",
        "TRACING.md",
        "METRICS.md",
        "BACKUP.md",
        "INTEGRATIONS.md",
        *(
            f"integrations/{page}.md"
            for page in ("celery", "django", "dramatiq", "fastapi", "faststream", "http", "taskiq")
        ),
    ],
)
def test_a_whole_chinese_page_has_the_same_code_tables_and_sections(name: str) -> None:
    english, chinese = ((ROOT / "docs" / folder / name).read_text() for folder in ("", "zh"))
    assert FENCES.findall(chinese) == FENCES.findall(english)
    generated = (
        (ROOT / "docs" / "reference" / GENERATED[name]).read_text() if name in GENERATED else ""
    )
    rows, translated = (
        [line.count("|") for line in page.splitlines() if line.startswith("|")]
        for page in (english + generated, chinese)
    )
    assert translated == rows
    sections, translated = (
        re.findall(r"^#+(?= )", FENCES.sub("", page), re.MULTILINE) for page in (english, chinese)
    )
    assert translated == sections


def test_the_chinese_readme_has_the_same_code_and_the_same_systems_and_features() -> None:
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/zh/README.md")]
    assert FENCES.findall(texts[0]) == FENCES.findall(texts[1])
    tables = [[line for line in text.splitlines() if line.count("|") == 8] for text in texts]
    assert len(tables[0]) == len(tables[1]) > 10


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n", "a\n", True),
        ("a\n", "b\n", False),
        ("", "a\n", False),
        ("a\n", "", False),
        ("a ... c\n", "a b c\n", True),
        ("...\nc\n", "a\nb\nc\n", True),
        ("...\nc\n", "c\n", True),
        ("a.c\n", "abc\n", False),
    ],
)
def test_printed_output_is_compared_with_the_page(shown: str, printed: str, same: bool) -> None:
    assert is_shown(shown, printed) is same
