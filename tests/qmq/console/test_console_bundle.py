"""The scripts in the package are those that frontend/ makes, and their types hold."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support import needs

ROOT = Path(__file__).resolve().parents[3]
STATIC = ROOT / "qmq" / "console" / "static"


@pytest.mark.sampled
@needs.node
@pytest.mark.xdist_group("chromium")
def test_the_bundle_in_the_package_is_what_the_sources_make(tmp_path: Path) -> None:
    frontend = tmp_path / "frontend"
    shutil.copytree(ROOT / "frontend", frontend, ignore=shutil.ignore_patterns("node_modules"))
    for command in (
        ["npm", "ci", "--ignore-scripts", "--no-progress"],
        ["npm", "run", "types"],
        ["node", "build.mjs", str(tmp_path / "made")],
    ):
        done = subprocess.run(command, cwd=frontend, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    made = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert made.keys() == {"app.js", "style.css", "LICENSES.txt"}
    for name, content in made.items():
        assert (STATIC / name).read_bytes() == content, (
            f"{name}: run `npm ci && npm run build` in frontend/, and commit what it makes"
        )


def test_what_a_page_loads_is_small() -> None:
    import gzip

    assert (
        sum(len(gzip.compress((STATIC / name).read_bytes())) for name in ("app.js", "style.css"))
        < 60_000
    )
