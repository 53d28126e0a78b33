"""Counts the calls of a metaserver: an interceptor in front of its methods."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from qmq.metrics.figures import Durations

_WAITING: Final = ("SyncMember", "ChangeRoute")
"""Long polls, whose durations are not measured."""


class CallCounts(grpc.aio.ServerInterceptor):
    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        """By method; streams are counted when they begin."""
        self.failures: dict[tuple[str, str], int] = {}
        """By method and gRPC's code."""
        self.durations = Durations()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # no such method: the name is whatever the caller sent
        method = str(handler_call_details.method).rpartition("/")[2]
        self.requests[method] = self.requests.get(method, 0) + 1
        if handler.unary_unary is None:
            return handler
        return grpc.unary_unary_rpc_method_handler(
            self._counted(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )

    def _counted(self, method: str, serve: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def counted(request: Any, context: Any) -> Any:
            begin = time.perf_counter()
            try:
                return await serve(request, context)
            except Exception:
                labels = (method, getattr(context.code(), "name", "UNKNOWN"))
                self.failures[labels] = self.failures.get(labels, 0) + 1
                raise
            finally:
                if method not in _WAITING:
                    self.durations.note(time.perf_counter() - begin)

        return counted
