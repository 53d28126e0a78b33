"""Run a suite: copy it, start what it needs, run it, compare."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from support import NodeProcess, eventually_sync, needs
from support.etcd_process import free_ports
from system.gateway_processes import Gateway

from judges.outcomes import Difference, Verdict, differences_of, verdict
from judges.suite import FOLDER, Stage, Suite, Unusable
from qmq.security.certificates import create_authority, issue

CACHE: Final = needs.CACHE / "judges"
DIFFERENCES: Final = FOLDER / "differences.json"


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of a suite found."""

    suite: Suite
    source: str
    """`PACKAGE VERSION`, or `commit HASH`."""
    verdict: Verdict
    output: str
    """What the suite printed."""


def differences(suite: Suite) -> list[Difference]:
    """The documented ones."""
    return differences_of(json.loads(DIFFERENCES.read_text())[suite.name])


def lacking(suite: Suite, checkout: Path | None) -> str | None:
    """Why a suite cannot run here."""
    if suite.needs_checkout and checkout is None:
        return no_checkout(suite)
    missing = [each for each in suite.programs if shutil.which(each) is None]
    if missing:
        return f"no {' and no '.join(missing)} on the PATH"
    unfetched = bool(suite.package) and checkout is None and not unpacked(suite).is_dir()
    if unfetched or not has_beside(suite):
        return f"the suite {suite.name} was not fetched: scripts/judges"
    return None


def no_checkout(suite: Suite) -> str:
    branch = f"--branch {suite.tag} --depth 1 " if suite.tag else ""
    return (
        f"no checkout of {suite.project}: git clone {branch}https://github.com/{suite.project}, "
        f"then scripts/judges {suite.name} CHECKOUT"
    )


def checkout_in(folder: str | None, suite: Suite) -> Path | None:
    """The suite's checkout in a folder of checkouts."""
    found = Path(folder, suite.project.rpartition("/")[2]) if folder and suite.project else None
    return found if found is not None and found.is_dir() else None


def judge(suite: Suite, checkout: Path | None) -> Report:
    """Run a suite, which was fetched. Raises Unusable."""
    why_not = lacking(suite, checkout)
    if why_not is not None:
        raise Unusable(why_not)
    with TemporaryDirectory(prefix=f"judges-{suite.name}-") as home, ExitStack() as stack:
        folder = Path(home)
        source = copied(suite, checkout, folder / "suite")
        out = folder / "out"
        out.mkdir()
        node = NodeProcess(folder / "node")
        stack.callback(node.kill)
        node.start()
        gateway = stack.enter_context(gateway_of(suite, node.address, folder / "certificates"))
        redis = stack.enter_context(redis_on(folder)) if suite.needs_redis else 0
        stage = Stage(folder / "suite", out, beside(suite), node.address, gateway, redis)
        found = verdict(suite.run(stage), differences(suite))
        return Report(suite, source, found, (out / "output").read_text(errors="replace"))


def copied(suite: Suite, checkout: Path | None, to: Path) -> str:
    """Copy the suite, and say what it is. Raises Unusable."""
    if checkout is None and suite.package:
        shutil.copytree(unpacked(suite), to)
        return f"{suite.package} {version(suite.package)}"
    if checkout is None:
        to.mkdir()
        return "this repository"
    asked = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    if asked.returncode:
        raise Unusable(f"{checkout} is no checkout: {asked.stderr.strip()}")
    for each in suite.parts:
        shutil.copytree(
            checkout / each,
            to / each,
            ignore=shutil.ignore_patterns(".git"),
            dirs_exist_ok=True,
        )
    return f"commit {asked.stdout.strip()[:12]}"


def unpacked(suite: Suite) -> Path:
    """The source distribution of the version that is installed."""
    return CACHE / f"{suite.package}-{version(suite.package)}"


def beside(suite: Suite) -> Path:
    """The folder with the packages that the suite needs beside the development environment's."""
    return CACHE / f"{suite.name}-packages"


def has_beside(suite: Suite) -> bool:
    stamp = beside(suite) / "complete"
    return not suite.beside or (stamp.exists() and stamp.read_text() == "\n".join(suite.beside))


def fetch(suite: Suite) -> None:
    """Fetch into the cache what the suite needs of PyPI and is not there. Raises Unusable."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if suite.package and not unpacked(suite).is_dir():
        name = unpacked(suite).name
        wanted = f"{suite.package}=={version(suite.package)}"
        pip("download", "--no-deps", "--no-binary", suite.package, "-d", str(CACHE), wanted)
        with TemporaryDirectory(dir=CACHE) as made, tarfile.open(CACHE / f"{name}.tar.gz") as file:
            file.extractall(made, filter="data")
            (Path(made) / name).rename(unpacked(suite))
    if not has_beside(suite):
        shutil.rmtree(beside(suite), ignore_errors=True)
        pip("install", "--no-deps", "--target", str(beside(suite)), *suite.beside)
        (beside(suite) / "complete").write_text("\n".join(suite.beside))


def pip(*arguments: str) -> None:
    """Raises Unusable."""
    command = [sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unusable(f"{' '.join(command)}: {done.stderr[-2000:]}")


@contextmanager
def gateway_of(suite: Suite, node: str, folder: Path) -> Iterator[str]:
    """The address of the suite's gateway, which has a certificate; empty if it needs none."""
    if suite.gateway is None:
        yield ""
        return
    create_authority(folder)
    made = issue(folder, "gateway", "node", ["127.0.0.1"])
    options = ("--tls-cert", str(made.cert), "--tls-key", str(made.key))
    gateway = Gateway(node, 0, *options, variables=suite.gateway)
    try:
        yield gateway.address
    finally:
        gateway.kill()


@contextmanager
def redis_on(folder: Path) -> Iterator[int]:
    """The port of a Redis that keeps nothing on disk."""
    (port,) = free_ports(1)
    process = subprocess.Popen(
        ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", ""],
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    try:
        eventually_sync(lambda: answers(port))
        yield port
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    """Whether something listens at a port."""
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0
