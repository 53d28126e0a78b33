"""The audit log: one JSON object a line, for every administrative act, every refusal and every
login that failed.

    {"at": "2026-11-23T12:00:00.000Z", "principal": "op:alice", "how": "token", "from":
    "10.0.0.7:51322", "action": "DeleteSubject",
     "request": "5f0c0e2ba31c77d4", "on": "subject orders", "result": "done", "details": "subject:
     \\"orders\\""}

    at         when the record was made, UTC
    principal  the caller; any:anonymous for a peer without certificate and token
    how        certificate, token, jwt, local or none
    from       the peer's address
    action     the RPC's name, or the kind of the frame
    request    the request's id: of a call what its metadata `x-request-id` says, or else a random
               one; of a frame its number on the connection
    on         the resource
    result     done, failed, denied, or would be denied (mode `watch`)
    details    of an act: the fields of its request, cut after `TEXT_CHARS_MAX` characters
    rule       the rule that decided, if one did
    error      the error's text, if there is one

The same refusal of the same principal is written at most once in `REPEAT_S`, with the count of the
omitted ones, so that a client that repeats a refused request does not fill the disk. Messages'
bodies, tokens and keys are never written.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Final

from qmq.errors import InvalidArgument
from qmq.process.event_loop import time_of
from qmq.text import visible

AUDIT: Final = logging.getLogger("qmq.audit")
REPEAT_S: Final = 10.0
REMEMBERED_MAX: Final = 1_000
TEXT_CHARS_MAX: Final = 300


def write_audit_to(path: Path) -> None:
    """Write the audit log to a file, in addition to other logging. Only its owner can read the
    file. It is reopened after a rotation.

    Raises InvalidArgument.
    """
    try:
        path.touch(mode=0o600)
        handler = WatchedFileHandler(path, encoding="utf-8")
    except OSError as cause:
        raise InvalidArgument(f"the audit log cannot be written: {cause}") from cause
    handler.setFormatter(logging.Formatter("%(message)s"))
    AUDIT.addHandler(handler)
    AUDIT.setLevel(logging.INFO)
    AUDIT.propagate = False


class AuditLog:
    """Writes records by the logger `qmq.audit`:
    refusals at the level WARNING, everything else at INFO.
    """

    def __init__(
        self,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic_s: Callable[[], float] = time.monotonic,
        logger: logging.Logger = AUDIT,
        sink: Callable[[str], None] | None = None,
    ) -> None:
        """`sink` is called with each record, and must not block."""
        self._now_ms, self._monotonic_s, self._logger, self._sink = (
            now_ms,
            monotonic_s,
            logger,
            sink,
        )
        self._refused: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()
        """By refusal: when it was last written, and how many equal refusals were left out since."""
        self.refusals = 0
        """The number of refusals, including those left out."""

    def write(
        self,
        *,
        principal: str,
        how: str,
        address: str,
        action: str,
        on: str,
        result: str,
        **more: object,
    ) -> None:
        at = time_of(self._now_ms()).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = {
            "at": at,
            "principal": principal,
            "how": how,
            "from": address,
            "action": action,
            "on": on,
            "result": result,
            **more,
        }
        clean = {
            name: visible(value)[:TEXT_CHARS_MAX] if isinstance(value, str) else value
            for name, value in record.items()
            if value
        }
        text = json.dumps(clean)
        self._logger.log(logging.WARNING if result == "denied" else logging.INFO, "%s", text)
        if self._sink is not None:
            self._sink(text)

    def refuse(
        self,
        *,
        principal: str,
        how: str,
        address: str,
        action: str,
        on: str,
        result: str = "denied",
        **more: object,
    ) -> None:
        """Record a refusal. Repeated refusals are counted,
        and written at most once in `REPEAT_S`.
        """
        self.refusals += 1
        what, now_s = (principal, action, on, result), self._monotonic_s()
        written_s, left_out = self._refused.get(what, (float("-inf"), 0))
        if now_s - written_s < REPEAT_S:
            self._refused[what] = written_s, left_out + 1
            return
        self._refused[what] = now_s, 0
        self._refused.move_to_end(what)
        if len(self._refused) > REMEMBERED_MAX:
            self._refused.popitem(last=False)
        self.write(
            principal=principal,
            how=how,
            address=address,
            action=action,
            on=on,
            result=result,
            repeated=left_out,
            **more,
        )
