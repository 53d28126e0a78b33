"""Folders and files that only the user of the process may read: messages are nobody else's business."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700


def make_private(folder: Path) -> None:
    """Make a folder and what is missing above it; one that exists keeps the rights that somebody gave it. Raises OSError."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
