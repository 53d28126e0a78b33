"""A node in the folder of the pipeline, for those who have no cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def own_node(folder: Path) -> Iterator[str]:
    """Run `qmq dev` on free ports. Yields its address. It ends with the block; its data stays."""
    command = [sys.executable, "-m", "qmq.cli", "dev", "--data", str(folder), "--console", "off"]
    for port in ("--port", "--data-port", "--control-port"):
        command += [port, "0"]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert node.stdout is not None
        line = node.stdout.readline()
        if "ready at" not in line:
            raise SystemExit(f"the node did not start: {line}")
        yield line.split("ready at ")[1].split()[0]
    finally:
        node.terminate()
        node.wait()
