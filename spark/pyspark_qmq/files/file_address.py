"""The address of a log in files; small and picklable for executors, which must see the same folders under the same names."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark_qmq.files.file_log import FileLog


@dataclass(frozen=True, slots=True)
class FileAddress:
    paths: tuple[str, ...]
    """Folders. Each item may be a glob, or several folders separated by commas."""
    committed: str = ""
    """`all`: treat all whole entries as committed if no committed position is known."""
    routes: str = ""
    """The file written by `qmq route export`, for ordered subjects."""

    def open(self) -> FileLog:
        """Does not read files yet. Raises InvalidArgument if `committed` is neither empty nor `all`."""
        return FileLog(self.paths, self.committed, self.routes)
