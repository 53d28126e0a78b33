"""Folders and files that only the process's user may read, because they hold messages or secrets."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from qmq.errors import DiskFull, InvalidArgument

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


def home_folder() -> Path | None:
    """The user's home folder; None for a user who has none, as in a container that runs under a random user id."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def below_home(base: str | None, *parts: str, variable: str) -> Path:
    """The folder `base`, which the environment's `variable` gives, or one below the home folder. Raises InvalidArgument without both."""
    if base:
        return Path(base)
    home = home_folder()
    if home is None:
        raise InvalidArgument(f"this user has no home folder: set HOME or {variable}")
    return home.joinpath(*parts)


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents. An existing folder keeps its permissions. Raises DiskFull, OSError."""
    if not folder.is_dir():
        make_private(folder.parent)
        try:
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        except OSError as cause:
            if cause.errno in NO_SPACE:
                raise DiskFull(f"no space left for the folder {folder.name}: free some space") from cause
            raise
