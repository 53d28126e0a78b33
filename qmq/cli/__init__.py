"""The `qmq` command runs servers, sends and consumes messages, administers a cluster, reads log
files. Each group of verbs has a file.
"""

from __future__ import annotations


def missing(cause: ImportError) -> str:
    """What to tell a user whose installation lacks a package of a command."""
    return (
        f"the qmq command needs another package ({cause.name} is missing): pip install "
        "'qmq[cli,server]'"
    )
