"""Trace context: the headers `traceparent` and `tracestate` by which a flow of messages is followed
from program to program. Pure.

The headers are those of the W3C recommendation "Trace Context", so every tracing system that
implements it (such as OpenTelemetry: `qmq/otel.py`) sees the flow:

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
                 version, trace, span in it, flags
    tracestate:  rojo=00f067aa0ba902b7,congo=t61rcWkgMzE
                 what tracing systems keep for themselves

Rules, as the recommendation has them:
* A `traceparent` that breaks the grammar counts as none, and so does its `tracestate`. A
  `tracestate` that breaks it is left out alone.
* A later version than 00 is read by its first four fields, and passed on as version 00. Of the
  flags only those that are known are kept.
* A program that does not take part in the trace passes both headers on unchanged.

The interceptor `TraceContext` passes the headers on: messages that a handler sends belong to the
trace of the message that it handles. It needs no library. With `begins=True` a message that is sent
outside any trace begins one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from qmq.client.interceptors import BaseInterceptor, Headers, Outgoing

if TYPE_CHECKING:
    from qmq.client.interceptors import AnyMessage

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
SAMPLED: Final = 0x01
"""The flag of a trace that the previous program records."""
RANDOM: Final = 0x02
"""The flag of a trace id whose last 7 bytes are random."""
STATES_MAX: Final = 32
"""Members of a `tracestate`."""

_PARENT: Final = re.compile(
    r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL
)
_STATE_KEY: Final = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}")
_STATE_VALUE: Final = re.compile(
    r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A place in a trace. Ids are lower-case hexadecimal digits:
    32 for the trace, 16 for the span.
    """

    trace_id: str
    span_id: str
    flags: int = 0
    state: tuple[tuple[str, str], ...] = ()
    """The entries of tracing systems, the newest first."""

    @property
    def is_sampled(self) -> bool:
        """Whether the previous program records the trace."""
        return self.flags & SAMPLED != 0

    def headers(self) -> dict[str, str]:
        """The context as headers of a message."""
        found = {TRACEPARENT: format_parent(self)}
        if self.state:
            found[TRACESTATE] = format_state(self.state)
        return found


def parse(headers: Mapping[str, str | bytes]) -> SpanContext | None:
    """The context in a message's headers; None if there is none, or it is malformed."""
    parent = parse_parent(_text(headers.get(TRACEPARENT, b"")))
    if parent is None:
        return None
    state = parse_state(_text(headers.get(TRACESTATE, b"")))
    return SpanContext(parent.trace_id, parent.span_id, parent.flags, state)


def parse_parent(text: str) -> SpanContext | None:
    """A `traceparent`, without state; None if it breaks the grammar."""
    found = _PARENT.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if trace_id == "0" * 32 or span_id == "0" * 16:
        return None
    return SpanContext(trace_id, span_id, int(flags, 16) & (SAMPLED | RANDOM))


def parse_state(text: str) -> tuple[tuple[str, str], ...]:
    """A `tracestate`; nothing if it breaks the grammar."""
    found: dict[str, str] = {}
    members = [each.strip(" \t") for each in text.split(",")]
    for member in filter(None, members):
        key, separator, value = member.partition("=")
        if (
            not separator
            or key in found
            or not _STATE_KEY.fullmatch(key)
            or not _STATE_VALUE.fullmatch(value)
        ):
            return ()
        found[key] = value
    return tuple(found.items()) if len(found) <= STATES_MAX else ()


def format_parent(context: SpanContext) -> str:
    """The `traceparent` of a context, in version 00."""
    return f"00-{context.trace_id}-{context.span_id}-{context.flags:02x}"


def format_state(state: tuple[tuple[str, str], ...]) -> str:
    """The `tracestate` of it."""
    return ",".join(f"{key}={value}" for key, value in state)


def begin(random_bytes: Callable[[int], bytes]) -> SpanContext:
    """A new trace, which is not recorded."""
    return SpanContext(_nonzero(random_bytes, 16), _nonzero(random_bytes, 8), RANDOM)


def _nonzero(random_bytes: Callable[[int], bytes], size: int) -> str:
    """A random id; all zeros would mean "none" and is avoided."""
    found = random_bytes(size).hex()
    return found if found.strip("0") else found[:-1] + "1"


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")


# --- in a program ---------------------------------------------------------------------------------

_current: ContextVar[SpanContext | None] = ContextVar("qmq_trace", default=None)


def current() -> SpanContext | None:
    """The trace of the current task; None if there is none."""
    return _current.get()


@contextmanager
def use(context: SpanContext | None) -> Iterator[None]:
    """Inside the block, sent messages belong to this trace."""
    before = _current.get()
    _current.set(context)
    try:
        yield
    finally:
        # Not by a token: a generator may be left in another task than the one that entered it,
        # where the token is invalid.
        if _current.get() is context:
            _current.set(before)


class TraceContext(BaseInterceptor):
    """Passes the trace of a handled message on to messages that its handler sends; see the module.
    Needs no tracing library.
    """

    def __init__(
        self, *, begins: bool = False, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._begins = begins
        self._random_bytes = random_bytes

    def sending(self, outgoing: Outgoing) -> Headers | list[dict[str, str]]:
        """Adds the headers to messages that have none of these headers."""
        context = _current.get() or (begin(self._random_bytes) if self._begins else None)
        if context is None:
            return {}
        headers = context.headers()
        if not any(TRACEPARENT in each for each in outgoing.headers):
            return headers
        return [{} if TRACEPARENT in each else headers for each in outgoing.headers]

    @contextmanager
    def handling(self, message: AnyMessage, group: str) -> Iterator[None]:
        """Makes the message's trace the current one."""
        with use(parse(message.headers)):
            yield
