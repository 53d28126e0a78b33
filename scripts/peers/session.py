"""The rows of a comparison, measured on one server: each with its own client process, with the CPU time of both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from servers import Peer, Server

CLIENTS: Final = Path(__file__).parent / "clients"
TIMEOUT_S: Final = 240.0
HEAD_START_S: Final = 1.5
"""A producer runs for so long before and after the consumer that it is measured with."""
END_TO_END: Final = "end to end"

Figures = dict[str, float]


class Session:
    """One peer's server, and how many messages it should have."""

    def __init__(self, peer: Peer, server: Server, python: Path, environment: Mapping[str, str] | None = None) -> None:
        self.peer = peer
        self._server = server
        self._python = Path(sys.executable) if peer.module == "qmq_client" else python
        self._environment = {**os.environ, **(environment or {})}
        self._stored = 0

    def _start(self, work: str, size: int, seconds: float, count: int = 0) -> subprocess.Popen[str]:
        words = (self.peer.module, work, self._server.address, size, seconds, count)
        command = [str(self._python), str(CLIENTS / "measured.py"), *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment)

    def _end(self, process: subprocess.Popen[str]) -> dict[str, float]:
        try:
            out, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{self.peer.name}: {errors[-1500:]}")
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        return found

    def row(self, work: str, size: int, seconds: float) -> Figures:
        """Messages a second, and microseconds of CPU time a message of server and clients."""
        before_s = self._server.cpu_s()
        if work == END_TO_END:
            producer = self._start("publish", size, seconds + HEAD_START_S)
            found = [self._end(self._start("consume", size, seconds)), self._end(producer)]
        else:
            found = [self._end(self._start(work, size, seconds, self._stored if work == "consume" else 0))]
        if work != "consume":
            self._stored += int(found[-1]["count"])
        slowest = min(found, key=lambda each: each["count"] / max(each["seconds"], 1e-9))
        return {
            "messages/s": slowest["count"] / max(slowest["seconds"], 1e-9),
            "server, us": 1e6 * (self._server.cpu_s() - before_s) / max(1, *(each["count"] for each in found)),
            "client, us": sum(1e6 * each["cpu_s"] / max(each["count"], 1) for each in found),
        }
