"""Where the token comes from that is shown to a server."""

from __future__ import annotations

from collections.abc import Callable

TokenSource = Callable[[], str]
"""Gives the present token. Raises InvalidArgument."""


def no_token() -> str:
    """Of somebody who has none."""
    return ""
