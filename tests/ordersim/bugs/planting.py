"""Plants a bug: replaces methods of a class, or names of a module, during a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from qmq.log import queue

BUGS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def plant(name: str, *places: tuple[Any, str, Any]) -> None:
    """A bug: what is replaced (where, name, by what)."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for where, attribute, other in places:
                stack.enter_context(patch.object(where, attribute, other))
            yield

    assert name not in BUGS
    BUGS[name] = planted


def changed(action: type[Any], change: Callable[..., Any]) -> tuple[Any, str, Any]:
    """A place for `plant`: another function changes the state for this kind of action."""
    part, _ = queue.CHANGES[action]
    return queue, "CHANGES", {**queue.CHANGES, action: (part, change)}
