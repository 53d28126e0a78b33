"""A process's folders and file descriptors: folders that only its user may read, because they hold
messages or secrets; the limit of descriptors, and how many of them connections may use.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from typing import Final

from qmq.errors import DiskFull, InvalidArgument, Overloaded, QmqError

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


def home_folder() -> Path | None:
    """The user's home folder; None for a user who has none, as in a container that runs under a
    random user id.
    """
    try:
        return Path.home()
    except RuntimeError:
        return None


def below_home(base: str | None, *parts: str, variable: str) -> Path:
    """The folder `base`, which the environment's `variable` gives, or one below the home folder.
    Raises InvalidArgument without both.
    """
    if base:
        return Path(base)
    home = home_folder()
    if home is None:
        raise InvalidArgument(f"this user has no home folder: set HOME or {variable}")
    return home.joinpath(*parts)


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents. An existing folder keeps its permissions. Raises
    DiskFull, OSError.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        try:
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        except OSError as cause:
            if cause.errno in NO_SPACE:
                raise DiskFull(
                    f"no space left for the folder {folder.name}: free some space"
                ) from cause
            raise


RESERVE: Final = 512
"""The descriptors kept for logs, control ports and replicas; half of the limit if that is less."""

SHORT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The errno values of a process or system that is out of descriptors or memory.
The condition is temporary.
"""


def refusal_of(cause: QmqError | OSError) -> QmqError:
    """The error that answers a request which failed while reading: `cause`, or Overloaded if the
    system has too few descriptors for a file.

    Raises any other OSError.
    """
    if isinstance(cause, QmqError):
        return cause
    if cause.errno not in SHORT_OF:
        raise cause
    return Overloaded(
        f"the broker has too few descriptors or too little memory ({cause}): try again"
    )


def connections_max(most: int, limit: int) -> int:
    """The number of connections that a process with `limit` descriptors accepts;
    at most `most`. Pure.
    """
    return max(min(most, limit - min(RESERVE, limit // 2)), 1)


def control_connections_max(limit: int, descriptors: int = 1) -> int:
    """The number of connections that a broker's control port accepts, by the descriptors of each.
    They may use half of the descriptors that clients cannot use. Pure.
    """
    return max(min(RESERVE, limit // 2) // 2 // descriptors, 1)


def limit() -> int:
    """The number of descriptors that this process may have."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Raise the limit to the most that the system allows an unprivileged process."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # some systems allow less than they report: the limit then does not change
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
