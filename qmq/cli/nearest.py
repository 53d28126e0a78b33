"""Suggests the nearest existing name for an unknown subject or group, and the corrected command.

error: [E105] there is no subject 'order': see `qmq subject list`
did you mean 'orders'? try: qmq group list orders
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from qmq.cli.known_names import group_names, subject_names
from qmq.errors import QmqError, UnknownGroup, UnknownSubject


class Given:
    """The arguments of this process's command, by parameter name (set by qmq/cli/added_options.py)."""

    values: Mapping[str, Any] = {}
    words: Sequence[str] = ()
    """The command line as typed, without `qmq`."""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The known name that is closest to `wrong`, or None if none is close. Pure."""
    names = {each.lower(): each for each in sorted(known)}
    found = get_close_matches(wrong.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found and names[found[0]] != wrong else None


def corrected(words: Sequence[str], wrong: str, right: str) -> str:
    """The command line with the right name; empty if the wrong name is not a word of it. Pure."""
    if wrong not in words:
        return ""
    return shlex.join(["qmq", *[right if word == wrong else word for word in words]])


def hint(failure: BaseException) -> str:
    """The hint below an error about an unknown subject or group; empty if no name is close. Asks the cluster once."""
    server = Given.values.get("server")
    if not isinstance(failure, UnknownSubject | UnknownGroup) or not server:
        return ""
    for wrong in _quoted(failure):
        known = subject_names(server) if isinstance(failure, UnknownSubject) else _groups(server)
        right = nearest(wrong, known)
        if right is not None:
            again = corrected(Given.words, wrong, right)
            return f"did you mean {right!r}?" + (f" try: {again}" if again else "")
    return ""


def _groups(server: str) -> list[str]:
    """The groups of the subject in the command, if it names one, followed by all other groups."""
    subject = Given.values.get("subject")
    return group_names(server, subject) if isinstance(subject, str) else group_names(server)


def _quoted(failure: QmqError) -> list[str]:
    """The first name quoted in the error message."""
    given = [each for value in Given.values.values() for each in (value if isinstance(value, list | tuple) else [value])]
    named = [each for each in given if isinstance(each, str) and each and repr(each) in failure.message]
    return sorted(named, key=lambda each: failure.message.index(repr(each)))[:1]
