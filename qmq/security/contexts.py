"""Contexts: the clusters of a person or a machine by name, each with its addresses and its
credentials.

    ~/.config/qmq/contexts.json     (or below XDG_CONFIG_HOME) for its owner only

A context gives values to environment variables that are not set: an argument overrides a variable,
and a variable overrides the context. A program uses the context that QMQ_CONTEXT names; without
that variable, the command line uses the current context. The file has no secrets, only the names of
the files that hold them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from qmq.errors import InvalidArgument
from qmq.model import check_name
from qmq.process.files import home_folder
from qmq.text import parse_json

CONTEXT_VARIABLE: Final = "QMQ_CONTEXT"
SERVER_VARIABLE: Final = "QMQ_SERVER"


@dataclass(frozen=True, slots=True)
class ClusterContext:
    """One cluster. An empty field is not set."""

    name: str
    server: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""

    def variables(self) -> dict[str, str]:
        """The environment variables that the context sets, with their values."""
        named = {
            SERVER_VARIABLE: self.server,
            "QMQ_TLS_CA": self.tls_ca,
            "QMQ_TLS_CERT": self.tls_cert,
            "QMQ_TLS_KEY": self.tls_key,
            "QMQ_TOKEN_FILE": self.token_file,
        }
        return {name: value for name, value in named.items() if value}


class ContextFile:
    """The file of all contexts. Every method raises InvalidArgument for a file
    that cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        """None: a user without a home folder, who has no contexts and can make none."""
        self._path = path

    @property
    def path(self) -> Path:
        """Raises InvalidArgument without a folder for it."""
        if self._path is None:
            raise InvalidArgument(
                "this user has no home folder for contexts: set HOME or XDG_CONFIG_HOME"
            )
        return self._path

    @classmethod
    def of_user(cls, environment: Mapping[str, str] = os.environ) -> ContextFile:
        base, home = environment.get("XDG_CONFIG_HOME"), home_folder()
        folder = Path(base) if base else None if home is None else home / ".config"
        return cls(None if folder is None else folder / "qmq" / "contexts.json")

    def load(self) -> tuple[str, dict[str, ClusterContext]]:
        """(the current context's name or "", all contexts by name)."""
        if self._path is None:
            return "", {}
        try:
            if self.path.stat().st_mode & 0o077:
                raise InvalidArgument(f"others may read {self.path}: chmod 600 {self.path}")
            found = parse_json(self.path.read_bytes())
            contexts = {
                name: ClusterContext(name, **values) for name, values in found["contexts"].items()
            }
            return found["current"], contexts
        except FileNotFoundError:
            return "", {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
            raise InvalidArgument(
                f"{self.path} cannot be used ({cause}): move it away, and `qmq context add` "
                "writes a new one"
            ) from cause

    def add(self, context: ClusterContext) -> None:
        """Store a context, and replace the one of the same name. The first context becomes the
        current one.
        """
        check_name("context", context.name)
        current, contexts = self.load()
        self._save(current or context.name, {**contexts, context.name: context})

    def use(self, name: str) -> None:
        """Make a context the current one."""
        _, contexts = self.load()
        self._save(self._known(name, contexts).name, contexts)

    def remove(self, name: str) -> None:
        current, contexts = self.load()
        self._known(name, contexts)
        self._save(
            "" if current == name else current,
            {key: each for key, each in contexts.items() if key != name},
        )

    def find(self, name: str) -> ClusterContext:
        return self._known(name, self.load()[1])

    def _known(self, name: str, contexts: Mapping[str, ClusterContext]) -> ClusterContext:
        if name not in contexts:
            raise InvalidArgument(
                f"there is no context {name!r}: `qmq context list` shows "
                f"{', '.join(sorted(contexts)) or 'none'}"
            )
        return contexts[name]

    def _save(self, current: str, contexts: Mapping[str, ClusterContext]) -> None:
        values = {
            name: {key: value for key, value in asdict(each).items() if value and key != "name"}
            for name, each in contexts.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = self.path.with_name(self.path.name + ".new")
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"current": current, "contexts": values}, file, indent=1, sort_keys=True)
        beside.replace(self.path)


def default_server(environment: Mapping[str, str] = os.environ) -> str:
    """The server's default address: from the environment or its context, else this machine.
    Raises InvalidArgument.
    """
    return environment_of(environment).get(SERVER_VARIABLE) or "localhost:20880"


def environment_of(
    environment: Mapping[str, str] = os.environ, *, uses_current: bool = False
) -> dict[str, str]:
    """The environment with the context's variables. `uses_current`: use the current context if none
    is named. Raises InvalidArgument.
    """
    name, file = environment.get(CONTEXT_VARIABLE, ""), ContextFile.of_user(environment)
    if not name and uses_current:
        name = file.load()[0]
    if not name:
        return dict(environment)
    variables = file.find(name).variables()
    # files of one kind are set together
    if any(each in environment for each in ("QMQ_TLS_CA", "QMQ_TLS_CERT", "QMQ_TLS_KEY")):
        variables = {
            key: value for key, value in variables.items() if not key.startswith("QMQ_TLS_")
        }
    if "QMQ_TOKEN" in environment:
        variables.pop("QMQ_TOKEN_FILE", None)
    return {**variables, **environment}
