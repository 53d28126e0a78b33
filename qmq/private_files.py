"""Folders and files that only the process's user may read, because they hold messages or secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents. An existing folder keeps its permissions. Raises OSError."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
