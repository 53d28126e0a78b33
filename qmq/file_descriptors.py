"""Open files and connections: how many a process may have, and what it keeps back from connections for its own files."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from qmq.errors import Overloaded

RESERVE: Final = 512
"""For logs, control ports and replicas; half of the limit where that is less."""

SHORT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the system says when a file or connection more is too many for now. That passes."""


@contextmanager
def shortage_is_overload() -> Iterator[None]:
    """For work that only reads. Raises Overloaded if the system is short of what a file needs; any other failure goes on as it is."""
    try:
        yield
    except OSError as cause:
        if cause.errno not in SHORT_OF:
            raise
        raise Overloaded(f"the broker has too few descriptors or too little memory ({cause}): try again") from cause


def connections_max(most: int, limit: int) -> int:
    """How many connections a process that may have `limit` descriptors takes; at most `most`. Pure."""
    return max(min(most, limit - min(RESERVE, limit // 2)), 1)


def control_connections_max(limit: int) -> int:
    """How many connections a broker's control port takes: half of what is kept back from clients. Pure."""
    return max(min(RESERVE, limit // 2) // 2, 1)


def limit() -> int:
    """How many descriptors this process may have."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """To the most that the system allows without a privilege."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems allow less than they say: then it stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
