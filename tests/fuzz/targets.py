"""What is fuzzed, by name. A target takes any bytes, and may raise nothing. It catches what its callers expect: QmqError, the gateway's
Refused, the command line's complaints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fuzz.bytes_targets import BYTES_TARGETS
from fuzz.request_targets import REQUEST_TARGETS

Target = Callable[[bytes], None]
TARGETS: Final[Mapping[str, Target]] = {**BYTES_TARGETS, **REQUEST_TARGETS}
