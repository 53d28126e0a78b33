"""Fetches the peers into a cache folder outside the tree: servers from Maven Central and the Go module proxy, Python clients from PyPI.

Redis and RabbitMQ come from the distribution (`apt-get install redis-server rabbitmq-server`). Versions are pinned here, in the two Maven
files, and in requirements.txt. What is in the cache already is not fetched again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
NATS_SERVER: Final = "github.com/nats-io/nats-server/v2@v2.15.2"


def cache_folder() -> Path:
    """`QMQ_PEERS_CACHE`, or a folder in the user's cache."""
    return Path(os.environ.get("QMQ_PEERS_CACHE") or Path.home() / ".cache" / "qmq-peers")


def jars(cache: Path, name: str) -> Path | None:
    """The folder of a Java server's class path; None without Maven and Java."""
    folder = cache / name
    if folder.is_dir():
        return folder
    if not (shutil.which("mvn") and shutil.which("java")):
        return None
    partial = folder.with_suffix(".partial")
    goal = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={partial}")
    subprocess.run(["mvn", "-q", "-B", "-f", str(HERE / f"{name}.xml"), *goal], check=True, stdout=sys.stderr)
    return partial.rename(folder)


def nats_server(cache: Path) -> Path | None:
    """The program; None without Go."""
    program = cache / "bin" / "nats-server"
    if not program.exists():
        if not shutil.which("go"):
            return None
        subprocess.run(["go", "install", NATS_SERVER], check=True, stdout=sys.stderr, env={**os.environ, "GOBIN": str(program.parent)})
    return program


def clients(cache: Path) -> Path:
    """The Python that has the peers' clients."""
    folder = cache / "venv"
    python = folder / "bin" / "python"
    wanted = (HERE / "requirements.txt").read_text()
    done = folder / "requirements.txt"
    if not done.exists() or done.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "-q", "install", "-r", str(HERE / "requirements.txt")], check=True, stdout=sys.stderr)
        done.write_text(wanted)
    return python


def fetch_all(cache: Path) -> Path:
    """Fetch everything that runs on this machine. Returns the Python with the clients."""
    for name in ("kafka", "rocketmq"):
        jars(cache, name)
    nats_server(cache)
    return clients(cache)


def program(name: str) -> Path | None:
    """A program of the distribution's; None if it is not installed."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib/rabbitmq/bin")
    return Path(found) if found else None
