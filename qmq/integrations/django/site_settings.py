"""Reads and checks `settings.QMQ` of a Django project: server, outbox and client options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from qmq.errors import InvalidArgument

KEYS = {"SERVER", "OUTBOX", "OPTIONS"}


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """`server` is as in `qmq.connect`, `options` are its other options. With `has_outbox`, `send` commits with the transaction."""

    server: str | None = None
    has_outbox: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls) -> SiteSettings:
        """The project's settings. Raises InvalidArgument."""
        given = getattr(settings, "QMQ", {})
        if not isinstance(given, dict) or set(given) - KEYS:
            raise InvalidArgument(f"settings.QMQ is a dict with some of {', '.join(sorted(KEYS))}, not {given!r}")
        return cls(given.get("SERVER"), bool(given.get("OUTBOX", True)), given.get("OPTIONS", {}))
