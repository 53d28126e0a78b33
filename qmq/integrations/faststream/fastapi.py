"""FastStream's router for FastAPI on QMQ:
`app.include_router(FastApiQmqRouter("localhost:20880"))`.

Handlers take FastAPI's dependencies, and the broker starts and stops with the application.
FastStream keeps this kind of router in 0.7 and moves it to its own package for 1.0. QMQ's own
support for FastAPI, which needs no FastStream, is `qmq.integrations.fastapi`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.datastructures import Default
from faststream._internal.fastapi.context import Context, ContextRepo, Logger
from faststream._internal.fastapi.router import StreamRouter

from qmq.integrations.faststream.broker import QmqBroker
from qmq.integrations.faststream.endpoints import SubjectPublisher, SubjectSubscriber
from qmq.integrations.faststream.messages import Raw

__all__ = ["Context", "ContextRepo", "FastApiQmqRouter", "Logger"]


class FastApiQmqRouter(StreamRouter[Raw]):
    """`options` are those of `QmqBroker` and of FastAPI's `APIRouter`."""

    broker_class = QmqBroker
    broker: QmqBroker

    def __init__(
        self, addresses: str | None = None, *, context: ContextRepo | None = None, **options: Any
    ) -> None:
        super().__init__(addresses, context=context, **options)

    def subscriber(  # type: ignore[override]
        self,
        subject: str,
        *,
        group: str,
        dependencies: Sequence[Any] = (),
        response_model: Any = Default(None),  # noqa: B008 - as in FastAPI's own signatures
        response_model_include: Any = None,
        response_model_exclude: Any = None,
        response_model_by_alias: bool = True,
        response_model_exclude_unset: bool = False,
        response_model_exclude_defaults: bool = False,
        response_model_exclude_none: bool = False,
        **options: Any,
    ) -> SubjectSubscriber:
        """As `QmqBroker.subscriber`; `response_model...` as in FastAPI's routes."""
        return super().subscriber(  # type: ignore[return-value]
            subject,
            group=group,
            dependencies=dependencies,
            response_model=response_model,
            response_model_include=response_model_include,
            response_model_exclude=response_model_exclude,
            response_model_by_alias=response_model_by_alias,
            response_model_exclude_unset=response_model_exclude_unset,
            response_model_exclude_defaults=response_model_exclude_defaults,
            response_model_exclude_none=response_model_exclude_none,
            **options,
        )

    def publisher(self, subject: str, **options: Any) -> SubjectPublisher:  # type: ignore[override]
        """As `QmqBroker.publisher`."""
        return self.broker.publisher(subject, **options)
