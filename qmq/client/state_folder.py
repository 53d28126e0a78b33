"""The client's folder on this machine, if it has one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qmq.errors import InvalidArgument
from qmq.private_files import below_home, home_folder

if TYPE_CHECKING:
    from qmq.client.ack_spool import AckSpool

StateDir = str | os.PathLike[str] | Literal[False] | None
"""A folder; None for the default; False for none."""


def folder_of(state_dir: StateDir, environment: Mapping[str, str], home: Path | None) -> Path | None:
    """QMQ_STATE_DIR, else `qmq` below XDG_STATE_HOME or ~/.local/state, unless one is named. Raises InvalidArgument. Pure."""
    if state_dir is False:
        return None
    if state_dir is not None:
        if not isinstance(state_dir, str | os.PathLike) or not os.fspath(state_dir):
            raise InvalidArgument(f"state_dir is a folder, or False for none, not {state_dir!r}")
        return Path(state_dir)
    if environment.get("QMQ_STATE_DIR"):
        return Path(environment["QMQ_STATE_DIR"])
    if environment.get("XDG_STATE_HOME") or home is not None:
        return user_state_folder(environment, home)
    return None


def user_state_folder(environment: Mapping[str, str], home: Path | None = None) -> Path:
    """`qmq` below XDG_STATE_HOME, else below ~/.local/state. Raises InvalidArgument if the user has no home folder."""
    base = environment.get("XDG_STATE_HOME")
    if not base and home is not None:
        return home / ".local" / "state" / "qmq"
    return below_home(base, ".local", "state", variable="XDG_STATE_HOME") / "qmq"


def store_of(state_dir: StateDir, addresses: Sequence[str]) -> AckSpool | None:
    """The spool for the clients of a cluster on this machine; None without a folder, and on systems without file locks."""
    folder = folder_of(state_dir, os.environ, home_folder())
    if folder is None or sys.platform == "win32":
        return None
    from qmq.client.ack_spool import AckSpool

    return AckSpool(folder, addresses)
