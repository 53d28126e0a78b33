"""The site builds without a warning, and no page links to what is not there, in the site or beside
it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([\w-]+))?\)")


def heading_ids(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in LINK.findall(text):
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in heading_ids(found), (
            f"{page.name} links to #{anchor}, which {found.name} has not"
        )


def test_the_site_builds_and_every_page_is_in_its_menu(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="scripts/setup installs it")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "tutorial" / "first-message" / "index.html").exists()


def test_a_test_that_a_page_names_is_there() -> None:
    for page in PAGES:
        for path, name in re.findall(r"`(?:tests/)?([\w/]+\.py)::(test_\w+)`", page.read_text()):
            found = ROOT / "tests" / path
            assert found.exists(), f"{page.name} names {path}, which is not there"
            assert re.search(rf"def {name}\(", found.read_text()), (
                f"{page.name} names {name}, which {path} has not"
            )
