"""The generated code in the repository is what the .proto files say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_generated_modules_are_those_of_the_proto_files(tmp_path: Path) -> None:
    environment = {**os.environ, "QMQ_PYTHON": sys.executable}
    subprocess.run([str(ROOT / "scripts" / "generate"), str(tmp_path)], check=True, env=environment)
    generated = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(generated) == 26
    for path in generated:
        name = path.relative_to(tmp_path)
        assert path.read_bytes() == (ROOT / name).read_bytes(), (
            f"run scripts/generate: {name} is stale"
        )
