"""Listeners of a Django project: functions in the modules `listeners` of its applications, run by
`manage.py qmq_listen`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.db import close_old_connections

from qmq.integrations.pending_listeners import PendingListeners


def with_connections(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the handler, so that database connections are renewed around it as Django
    does around a request.
    """
    if inspect.iscoroutinefunction(handler):

        @functools.wraps(handler)
        async def handle(*positional: Any, **named: Any) -> Any:
            await sync_to_async(close_old_connections)()
            try:
                return await handler(*positional, **named)
            finally:
                await sync_to_async(close_old_connections)()

        return handle

    @functools.wraps(handler)
    def handle_in_thread(*positional: Any, **named: Any) -> Any:
        close_old_connections()
        try:
            return handler(*positional, **named)
        finally:
            close_old_connections()

    return handle_in_thread


registered: Final = PendingListeners(with_connections)
listener = registered.listener
"""Register a function as a handler. As `Client.listener`;
errors are raised when `qmq_listen` starts.
"""
