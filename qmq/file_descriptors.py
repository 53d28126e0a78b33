"""File descriptors: the limit of a process, and the descriptors that connections may not use."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import Final

from qmq.errors import Overloaded, QmqError

RESERVE: Final = 512
"""The descriptors kept for logs, control ports and replicas; half of the limit if that is less."""

SHORT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The errno values of a process or system that is out of descriptors or memory. The condition is temporary."""


def refusal_of(cause: QmqError | OSError) -> QmqError:
    """The error that answers a request which failed while reading: `cause`, or Overloaded if the system has too few descriptors for a file.

    Raises any other OSError.
    """
    if isinstance(cause, QmqError):
        return cause
    if cause.errno not in SHORT_OF:
        raise cause
    return Overloaded(f"the broker has too few descriptors or too little memory ({cause}): try again")


def connections_max(most: int, limit: int) -> int:
    """The number of connections that a process with `limit` descriptors accepts; at most `most`. Pure."""
    return max(min(most, limit - min(RESERVE, limit // 2)), 1)


def control_connections_max(limit: int, descriptors: int = 1) -> int:
    """The number of connections that a broker's control port accepts, by the descriptors of each. They may use half of the descriptors that
    clients cannot use. Pure.
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
    with suppress(ValueError, OSError):  # some systems allow less than they report: the limit does not change
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
