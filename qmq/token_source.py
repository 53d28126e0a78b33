"""Where a process gets the token that it shows to servers."""

from __future__ import annotations

from collections.abc import Callable

TokenSource = Callable[[], str]
"""Returns the current token. Raises InvalidArgument."""


def no_token() -> str:
    """The token of a process that has none: empty."""
    return ""
