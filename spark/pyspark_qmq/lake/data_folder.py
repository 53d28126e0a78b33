"""The folder of a table's data files. Unlike PyIceberg's own storage, the value can be pickled for other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyiceberg.io import OutputStream, load_file_io


@dataclass(frozen=True, slots=True)
class DataFolder:
    """The folder of a table's data files.

    `properties` are PyIceberg's properties of the storage. They may contain its access keys, so that executors can write.
    """

    root: str
    properties: Mapping[str, str]

    def location(self, name: str) -> str:
        """The address of a data file of this name."""
        return f"{self.root}/{name}"

    def create(self, location: str) -> OutputStream:
        """Create a file and open it for writing. Raises FileExistsError."""
        return load_file_io(dict(self.properties), location).new_output(location).create()
