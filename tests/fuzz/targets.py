"""The fuzz targets by name. A target accepts any bytes and must not raise. A target catches the errors that its callers expect: QmqError,
the gateway's Refused, usage errors of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fuzz.bytes_targets import BYTES_TARGETS
from fuzz.request_targets import REQUEST_TARGETS

Target = Callable[[bytes], None]
TARGETS: Final[Mapping[str, Target]] = {**BYTES_TARGETS, **REQUEST_TARGETS}
