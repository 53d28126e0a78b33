"""The source of the token that a process shows to servers."""

from __future__ import annotations

from collections.abc import Callable

TokenSource = Callable[[], str]
"""Returns the current token. Raises InvalidArgument."""


def no_token() -> str:
    """The token of a process that has none: empty."""
    return ""
