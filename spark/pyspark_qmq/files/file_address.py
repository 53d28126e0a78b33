"""Where files are: small, and can be sent to executors, which must see the same folders under the same names."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark_qmq.files.file_log import FileLog


@dataclass(frozen=True, slots=True)
class FileAddress:
    paths: tuple[str, ...]
    """Folders; each may have a glob in it, or be several with commas."""
    committed: str = ""
    """`all`: where nothing says what is committed, everything whole is."""
    routes: str = ""
    """The file that `qmq route export` wrote, for ordered subjects."""

    def open(self) -> FileLog:
        """Looks at no file yet. Raises InvalidArgument if `committed` is neither empty nor `all`."""
        return FileLog(self.paths, self.committed, self.routes)
