"""Checks a service's health with the file's own health check, like a container engine but more
often.

It first tries a TCP connection to the port that `etcdctl` or `qmq` would ask, which costs almost
nothing and avoids starting a Go or Python process every few milliseconds while the service starts.
A check by a shell runs at once. If `etcdctl` is missing (Debian packages it apart from etcd), etcd
is asked over HTTP, at /health.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CONNECT_S: Final = 0.5
PORT: Final = re.compile(r"[\w.-]:(\d+)\b")


@dataclass(frozen=True, slots=True)
class Check:
    """A health check, translated."""

    argv: Sequence[str]
    """Empty: ask over HTTP."""
    environment: Mapping[str, str]
    address: str
    port: int
    """0: no port is named."""
    timeout_s: float

    def failure(self) -> str:
        """Why the service is not healthy; empty if it is."""
        if self.port and not _listens(self.address, self.port):
            return f"no process listens at {self.address}:{self.port}"
        return self._command() if self.argv else self._http()

    def _command(self) -> str:
        try:
            done = subprocess.run(
                self.argv,
                env=dict(self.environment),
                capture_output=True,
                text=True,
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {self.timeout_s:g} s"
        return (
            f"exit status {done.returncode}: {(done.stderr or done.stdout).strip()}"
            if done.returncode
            else ""
        )

    def _http(self) -> str:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(
                f"http://{self.address}:{self.port}/health", timeout=self.timeout_s
            ) as answer:
                told = json.load(answer)
        except (OSError, ValueError) as cause:
            return str(cause)
        return "" if told.get("health") == "true" else str(told)


def port_of(argv: Sequence[str]) -> int:
    """The first port that a health check names; 0 if it names none."""
    return next((int(found[1]) for word in argv if (found := PORT.search(word))), 0)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError:
        return False
    return True
