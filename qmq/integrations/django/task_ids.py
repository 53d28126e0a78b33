"""The id of a task, which is the body of its message. Imports nothing of Django."""

from __future__ import annotations

from typing import Final

import qmq

ID_CHARS: Final = 32
"""The length of an id."""


def task_id(body: bytes) -> str:
    """The id that a message names. Raises qmq.Reject for the body of another program: no later
    attempt makes a task of it.
    """
    if len(body) != ID_CHARS or not body.isalnum():
        raise qmq.Reject(
            f"a message of {len(body)} bytes that begins with {body[:40]!r} names no task: "
            "did another program send it?"
        )
    return body.decode("ascii")
