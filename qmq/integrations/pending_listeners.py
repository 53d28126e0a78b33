"""Collects handlers of an application until its client exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

from qmq.blocking import BlockingClient
from qmq.client.client import Client
from qmq.client.listening.listener_options import ListenerOptions

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class PendingListeners:
    """Handlers in the order of their registration. `wrapped` converts a handler to the function
    that runs.
    """

    def __init__(
        self, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda handler: handler
    ) -> None:
        self._wrapped = wrapped
        self._registered: list[tuple[str, Callable[..., Any], str, ListenerOptions]] = []

    def __len__(self) -> int:
        return len(self._registered)

    def listener(
        self, subject: str, group: str, **options: Unpack[ListenerOptions]
    ) -> Callable[[_Handler], _Handler]:
        """Register a function as a handler. As `Client.listener`;
        errors are raised by `listen_with`.
        """

        def register(handler: _Handler) -> _Handler:
            self._registered.append((subject, self._wrapped(handler), group, options))
            return handler

        return register

    def listen_with(self, client: Client | BlockingClient) -> None:
        """Register the handlers with a client. Raises InvalidName, InvalidArgument."""
        for subject, handler, group, options in self._registered:
            client.listen(subject, handler, group, **options)
