"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from qmq.errors import InvalidArgument

Words = Annotated[
    list[str],
    typer.Argument(metavar="[SUBJECT] ID", help="The id of a message or of a delayed message. Give the subject to search faster."),
]


def subject_and_id(words: list[str]) -> tuple[str, str]:
    """The subject, if given, and the id. Raises BadParameter."""
    if len(words) == 1:
        return "", words[0]
    if len(words) == 2:
        return words[0], words[1]
    raise typer.BadParameter("give [SUBJECT] ID")


PORT_MAX: Final = 65_535
_PEM_FILES: Final = {"ca": "the authority of the servers' certificates", "cert": "the client's certificate", "key": "the certificate's key"}


def port_option(text: str, envvar: str | None = None) -> Any:
    """An option for a port to listen on. 0 means any free port; the help says so after `text`."""
    return typer.Option(min=0, max=PORT_MAX, envvar=envvar, help=f"{text}; 0: any free port.")


def port_of(parts: str, number: int, given: int, step: int = 1) -> int:
    """The port of one of several `parts`, such as "shards", whose first, 0, has the given port. Any free port stays any free port. Raises
    InvalidArgument.
    """
    found = given + step * number if given else 0
    if found > PORT_MAX:
        raise InvalidArgument(f"port {given} + {step * number} is over {PORT_MAX}: use lower ports, or fewer {parts}")
    return found


def tls_option(part: str, *, has_variable: bool = True) -> Any:
    """`--tls-ca`, `--tls-cert` or `--tls-key` of a client; also QMQ_TLS_CA and so on if `has_variable`."""
    return typer.Option(f"--tls-{part}", envvar=f"QMQ_TLS_{part.upper()}" if has_variable else None, help=f"PEM file: {_PEM_FILES[part]}.")
