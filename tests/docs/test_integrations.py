"""The pages of the integrations run, and print what they show."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import NodeProcess
from support.code_blocks import blocks_of, require_shown
from support.etcd_process import free_ports

pytestmark = pytest.mark.sampled

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "integrations").glob("*.md"))
MODULES = {
    "celery": "celery",
    "http": "starlette",
    "taskiq": "taskiq",
    "django": "django",
    "dramatiq": "dramatiq",
    "fastapi": "fastapi",
    "faststream": "faststream",
}
"""The packages that a page needs, besides QMQ."""
PORT = "8089"
"""The port in pages that start a server. The test replaces it by a free port."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node, started as the pages say. Each page has its own subjects."""
    node = NodeProcess(tmp_path_factory.mktemp("node"))
    yield node.start()
    node.kill()


@pytest.mark.sampled
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_an_integrations_page_shows_is_what_its_code_prints(
    page: Path, address: str, tmp_path: Path
) -> None:
    if find_spec(MODULES[page.stem]) is None:
        pytest.skip(f"needs {MODULES[page.stem]}")
    copy = tmp_path / page.name
    copy.write_text(page.read_text().replace(PORT, str(free_ports(1)[0])))
    require_shown(copy, address, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_first_task_takes_ten_lines(page: Path) -> None:
    first = next(blocks_of(page))
    assert len([line for line in first.code.splitlines() if line.strip()]) <= 10
