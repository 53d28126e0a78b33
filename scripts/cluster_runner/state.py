"""The state between two commands, in the state folder:

    state.json      the network, its slot, the processes (pid and start time), the cuts
    compose.json    the resolved file of the last `up`: a restarted service keeps its settings, even
                    if the shell's environment has changed
    logs/           each service's output
    volumes/        each named volume

The network and the slot stay after `down`, because etcd's members remember their addresses; only
`down --volumes` forgets them.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster_runner.processes import Process


@dataclass
class State:
    """The saved state of one cluster."""

    network: str = ""
    slot: int = -1
    is_claimed: bool = False
    """Whether the network's slot is held now."""
    order: list[str] = field(default_factory=list)
    """The services, by the number in their address. New services come last, so that a changed file
    keeps the other addresses.
    """
    processes: dict[str, Process] = field(default_factory=dict)
    cuts: list[tuple[str, str]] = field(default_factory=list)
    """Source and target of each cut."""


class StateFolder:
    """The folder, and its files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve()

    def volume(self, name: str) -> Path:
        """The folder that stands for a named volume."""
        return self.path / "volumes" / name

    def log(self, service: str) -> Path:
        return self.path / "logs" / f"{service}.log"

    @property
    def has_data(self) -> bool:
        """Whether a volume was ever written."""
        volumes = self.path / "volumes"
        return volumes.is_dir() and any(any(each.iterdir()) for each in volumes.iterdir())

    def load(self) -> State:
        """The last saved state; a new one if there is none."""
        file = self.path / "state.json"
        if not file.exists():
            return State()
        saved: dict[str, Any] = json.loads(file.read_text())
        saved["processes"] = {name: Process(**each) for name, each in saved["processes"].items()}
        saved["cuts"] = [(source, target) for source, target in saved["cuts"]]
        return State(**saved)

    @contextmanager
    def changing(self) -> Iterator[State]:
        """The state, saved at the end; one command at a time."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self.load()
            try:
                yield state
            finally:
                self._write("state.json", asdict(state))

    def save_model(self, model: dict[str, Any]) -> None:
        """Remember the resolved file."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write("compose.json", model)

    def load_model(self) -> dict[str, Any] | None:
        """The resolved file of the last `up`, if there was one."""
        file = self.path / "compose.json"
        if not file.exists():
            return None
        model: dict[str, Any] = json.loads(file.read_text())
        return model

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Write the file atomically, for readers without the lock."""
        fresh = self.path / f"{name}.new"
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(fresh, self.path / name)
