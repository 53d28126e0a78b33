"""Fetches the peers into a cache folder outside the tree: servers from Maven Central and the Go
module proxy, Python clients from PyPI.

Redis and RabbitMQ come from the distribution (`apt-get install redis-server rabbitmq-server`).
Versions are pinned here, in the Maven files, and in requirements.txt. What is in the cache already
is not fetched again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
NATS_SERVER: Final = "github.com/nats-io/nats-server/v2@v2.15.2"


def cache_folder() -> Path:
    """`QMQ_PEERS_CACHE`, or a folder in the user's cache."""
    return Path(os.environ.get("QMQ_PEERS_CACHE") or Path.home() / ".cache" / "qmq-peers")


def jars(cache: Path, name: str) -> Path | None:
    """The folder with a Java class path; None without Maven and Java."""
    folder = cache / name
    if folder.is_dir():
        return folder
    if not (shutil.which("mvn") and shutil.which("java")):
        return None
    partial = folder.with_suffix(".partial")
    goal = (
        "dependency:copy-dependencies",
        "-DincludeScope=runtime",
        f"-DoutputDirectory={partial}",
    )
    subprocess.run(
        ["mvn", "-q", "-B", "-f", str(HERE / f"{name}.xml"), *goal], check=True, stdout=sys.stderr
    )
    return partial.rename(folder)


def nats_server(cache: Path) -> Path | None:
    """The program; None without Go."""
    program = cache / "bin" / "nats-server"
    if not program.exists():
        if not shutil.which("go"):
            return None
        subprocess.run(
            ["go", "install", NATS_SERVER],
            check=True,
            stdout=sys.stderr,
            env={**os.environ, "GOBIN": str(program.parent)},
        )
    return program


def nats_client(cache: Path) -> Path | None:
    """The program in `clients/go`, built again when its source has changed; None without Go."""
    program, source = cache / "bin" / "nats-client", HERE / "clients" / "go"
    if not shutil.which("go"):
        return None
    if not program.exists() or any(
        each.stat().st_mtime > program.stat().st_mtime for each in source.iterdir()
    ):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
            for words in (("mod", "tidy"), ("build", "-o", str(program), ".")):
                subprocess.run(["go", *words], cwd=folder, check=True, stdout=sys.stderr)
    return program


def java_clients(cache: Path) -> Path | None:
    """The folder with the classes of `clients/java`; None without a compiler or the jars."""
    folder, sources = cache / "java", sorted((HERE / "clients" / "java").iterdir())
    if not shutil.which("javac") or not all(
        (cache / name).is_dir() for name in ("kafka", "rocketmq")
    ):
        return None
    made = folder / f"{sources[0].stem}.class"
    if not made.exists() or any(each.stat().st_mtime > made.stat().st_mtime for each in sources):
        command = [
            "javac",
            "-cp",
            f"{cache / 'kafka'}/*:{cache / 'rocketmq'}/*",
            "-d",
            str(folder),
            *map(str, sources),
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def clients(cache: Path) -> Path:
    """The Python that has the peers' clients."""
    folder = cache / "venv"
    python = folder / "bin" / "python"
    wanted = (HERE / "requirements.txt").read_text()
    done = folder / "requirements.txt"
    if not done.exists() or done.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [str(python), "-m", "pip", "-q", "install", "-r", str(HERE / "requirements.txt")],
            check=True,
            stdout=sys.stderr,
        )
        done.write_text(wanted)
    return python


def fetch_all(cache: Path) -> Path:
    """Fetch everything that runs on this machine. Returns the Python with the clients."""
    for name in ("kafka", "rocketmq", "spark"):
        jars(cache, name)
    nats_server(cache)
    nats_client(cache)
    java_clients(cache)
    return clients(cache)


def versions(cache: Path, python: Path) -> dict[str, str]:
    """The version of each system and client that this run uses."""
    found = {
        "Python": sys.version.split()[0],
        "kafka": _of_maven("kafka"),
        "RocketMQ": _of_maven("rocketmq"),
        "PySpark": metadata.version("pyspark"),
        "spark-sql-kafka": _of_maven("spark"),
        "nats-server": NATS_SERVER.rpartition("@v")[2],
    }
    for name, command in {
        "redis-server": ["redis-server", "--version"],
        "RabbitMQ": ["dpkg-query", "-W", "rabbitmq-server"],
        "Java": ["java", "--version"],
    }.items():
        if shutil.which(command[0]):
            said = subprocess.run(command, capture_output=True, text=True).stdout
            match = re.search(r"\d+\.\d+[.\d]*", said)
            found[name] = match[0] if match else "unknown"
    listed = subprocess.run(
        [str(python), "-m", "pip", "freeze"], capture_output=True, text=True
    ).stdout
    wanted = {
        line.partition("==")[0]
        for line in (HERE / "requirements.txt").read_text().splitlines()
        if "==" in line
    }
    found |= {
        name: version
        for name, _, version in (line.partition("==") for line in listed.splitlines())
        if name in wanted
    }
    found["nats.go"] = re.search(
        r"nats.go v(\S+)", (HERE / "clients" / "go" / "go.mod").read_text()
    )[1]  # type: ignore[index]
    return found


def _of_maven(name: str) -> str:
    return re.findall(r"<version>(\d+\.[\d.]+)</version>", (HERE / f"{name}.xml").read_text())[0]


def program(name: str) -> Path | None:
    """A program of the distribution's; None if it is not installed."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib/rabbitmq/bin")
    return Path(found) if found else None
