"""Reads the compose file with the compose binary.

The binary handles anchors, interpolation, profiles and short forms: `docker-compose config --format
json` prints the resolved file. A `Service` has the parts that a process needs. Durations are in
Go's format ("1m30s").
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster_runner.errors import ClusterError

ROOT: Final = Path(__file__).resolve().parents[2]
COMPOSE_FILE: Final = ROOT / "docker-compose.yml"
SECURE_FILE: Final = ROOT / "docker-compose.secure.yml"
UNIT_S: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
GRACE_S: Final = 10.0
"""Compose's own default of stop_grace_period."""


@dataclass(frozen=True, slots=True)
class Service:
    """One service as in the file, before translation for this machine."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    health: tuple[str, ...]
    """The health check's argv; empty if there is none."""
    health_timeout_s: float
    volumes: dict[str, str]
    """Path in the container to the volume's name, or to a path in the volume."""
    depends_on: tuple[str, ...]
    grace_s: float
    profiles: tuple[str, ...]
    ends: bool
    """Whether the service must exit with status 0 before dependent services start."""


def compose_binary() -> Path:
    """The real compose: the one beside this Python (the development lock brings it), else the one
    on PATH.
    """
    beside = Path(sys.executable).with_name("docker-compose")
    found = str(beside) if beside.exists() else shutil.which("docker-compose")
    if not found:
        raise ClusterError(
            "docker-compose is missing: scripts/setup installs it from requirements.lock"
        )
    return Path(found)


def resolve(file: Path, environment: Mapping[str, str], *overrides: Path) -> dict[str, Any]:
    """The file and what is merged into it, with everything put in; `environment` goes over this
    process's own for ${...}.
    """
    named = [word for each in (file, *overrides) for word in ("-f", str(each))]
    command = [str(compose_binary()), *named, "--profile", "*", "config", "--format", "json"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"compose refuses {file}: {done.stderr.strip()}")
    model: dict[str, Any] = json.loads(done.stdout)
    return model


def services(model: Mapping[str, Any]) -> dict[str, Service]:
    """Every service of a resolved file."""
    needs = [
        each for body in model["services"].values() for each in body.get("depends_on", {}).items()
    ]
    ending = {name for name, need in needs if need["condition"] == "service_completed_successfully"}
    return {name: _service(name, body, name in ending) for name, body in model["services"].items()}


def waves(known: Mapping[str, Service], wanted: Collection[str]) -> list[list[str]]:
    """The wanted services in steps, each of which depends only on earlier steps. Other services are
    assumed to be running.
    """
    left, steps = [name for name in known if name in wanted], list[list[str]]()
    while left:
        step = [name for name in left if not set(known[name].depends_on) & set(left)]
        if not step:
            raise ClusterError(f"{', '.join(left)} depend on each other in a circle")
        steps.append(step)
        left = [name for name in left if name not in step]
    return steps


def with_dependencies(known: Mapping[str, Service], wanted: Collection[str]) -> set[str]:
    """The wanted services and all that they need."""
    found, todo = set[str](), list(wanted)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += known[name].depends_on
    return found


def seconds(duration: str) -> float:
    """A duration as Go prints it: `seconds("1m30s") == 90.0`."""
    parts = re.findall(r"([\d.]+)(h|ms|us|µs|ns|m|s)", duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ClusterError(f"{duration!r} is not a duration")
    return sum(float(number) * UNIT_S[unit] for number, unit in parts)


def _service(name: str, body: Mapping[str, Any], ends: bool) -> Service:
    command = [*(body.get("entrypoint") or ()), *(body.get("command") or ())]
    if not command:
        raise ClusterError(
            f"service {name} names no command: the image's own is not known without the image"
        )
    check = body.get("healthcheck", {})
    return Service(
        name=name,
        command=tuple(map(_plain, command)),
        environment={
            key: _plain(value or "") for key, value in body.get("environment", {}).items()
        },
        health=_health(name, check),
        health_timeout_s=seconds(check.get("timeout", "30s")),
        volumes={
            each["target"]: _volume(each)
            for each in body.get("volumes", ())
            if each["type"] == "volume"
        },
        depends_on=tuple(body.get("depends_on", ())),
        grace_s=seconds(body["stop_grace_period"]) if "stop_grace_period" in body else GRACE_S,
        profiles=tuple(body.get("profiles", ())),
        ends=ends,
    )


def _volume(mount: Mapping[str, Any]) -> str:
    inside = mount.get("volume", {}).get("subpath", "")
    return f"{mount['source']}/{inside}" if inside else str(mount["source"])


def _health(name: str, check: Mapping[str, Any]) -> tuple[str, ...]:
    test = check.get("test", [])
    if check.get("disable") or not test or test[0] == "NONE":
        return ()
    if test[0] != "CMD":
        raise ClusterError(
            f"service {name}: write the health check as [CMD, ...], a shell is not in every image"
        )
    return tuple(map(_plain, test[1:]))


def _plain(text: str) -> str:
    """`config` prints a dollar sign as two, so that its output is a compose file again."""
    return text.replace("$$", "$")
