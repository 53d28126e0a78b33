"""Refusals by access control, and its mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.metrics.figures import COUNTER, GAUGE, Figure, Reading, one
from qmq.security.access_control import AccessControl
from qmq.security.access_rules import AccessMode

MODE: Final = Figure("qmq_access_mode", GAUGE, (), "Mode of access control: 0 off, 1 watch, 2 enforce.")
REFUSALS: Final = Figure("qmq_access_refusals_total", COUNTER, (), "Requests and logins that were refused, or would be in mode watch.")
_NUMBERS: Final = {AccessMode.OFF: 0, AccessMode.WATCH: 1, AccessMode.ENFORCE: 2}


class AccessSource:
    figures: Final = (MODE, REFUSALS)

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    def read(self) -> Iterator[Reading | None]:
        yield one(MODE, _NUMBERS[self._access.mode])
        yield one(REFUSALS, self._access.audit.refusals)
