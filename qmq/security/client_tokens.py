"""Finds a client's token: in an argument, a file, or the environment.

QMQ_TOKEN_FILE   a file with the token, which is read again when it changes: as Kubernetes renews it
QMQ_TOKEN        the token itself
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from qmq.errors import InvalidArgument
from qmq.security.contexts import environment_of
from qmq.token_source import TokenSource

TOKEN_VARIABLE: Final = "QMQ_TOKEN"  # noqa: S105 - a name
TOKEN_FILE_VARIABLE: Final = "QMQ_TOKEN_FILE"  # noqa: S105 - a name
LOOK_S: Final = 1.0
TOKEN_CHARS_MAX: Final = 8_192

Token = str | Path | TokenSource | None
"""A token, the file that contains the token, or a function that returns the current token."""


class TokenFile:
    """A file that contains a token. A call returns the current token. Raises InvalidArgument if the file cannot be read."""

    def __init__(self, path: Path, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._path, self._monotonic_s = path, monotonic_s
        self._looked_s = float("-inf")
        self._token = ""

    def __call__(self) -> str:
        now_s = self._monotonic_s()
        if now_s - self._looked_s >= LOOK_S:
            self._token = self._read()
            self._looked_s = now_s
        return self._token

    def _read(self) -> str:
        try:
            found = self._path.read_text().strip()
        except (OSError, ValueError) as cause:
            raise InvalidArgument(f"the token cannot be read from {self._path}: {cause}") from cause
        return check(found, str(self._path))


def check(token: str, where: str) -> str:
    """Return the token. Raises InvalidArgument for an impossible token; the error's text does not contain the token."""
    if not token or len(token) > TOKEN_CHARS_MAX or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument(f"{where} has no token: a token is one word of at most {TOKEN_CHARS_MAX} characters")
    return token


def token_source(token: Token, environment: Mapping[str, str] | None = None) -> TokenSource | None:
    """The token's source: the argument, or else the environment or its context; None if there is none. Raises InvalidArgument."""
    if token is None:
        environment = environment_of() if environment is None else environment
        path, text = environment.get(TOKEN_FILE_VARIABLE), environment.get(TOKEN_VARIABLE)
        if path:
            return TokenFile(Path(path))
        token = text or None
    if token is None:
        return None
    if isinstance(token, Path):
        return TokenFile(token)
    if isinstance(token, str):
        text = check(token, "token")
        return lambda: text
    return token
