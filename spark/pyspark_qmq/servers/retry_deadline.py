"""Retries of operations whose failure may be temporary: another metaserver, a new master."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from qmq.errors import QmqError, Unavailable

PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 0.5

_R = TypeVar("_R")


def patiently(act: Callable[[], _R], retry_ms: int) -> _R:
    """Retry an operation that raises Unavailable, with growing pauses and jitter, for `retry_ms`; then raise the last error."""
    retrying = Retrying(
        retry=retry_if_exception_type(Unavailable),
        stop=stop_after_delay(retry_ms / 1000),
        reraise=True,
        wait=wait_random_exponential(multiplier=PAUSE_S_MIN, max=PAUSE_S_MAX),
    )
    return retrying(act)


class RetryDeadline:
    """The same for work in steps: `retry_ms` counts from the last successful step."""

    def __init__(self, retry_ms: int) -> None:
        self._retry_ms = retry_ms
        self._until_s = 0.0
        self._tries = 0
        self.renew()

    def renew(self) -> None:
        """A step succeeded: start the deadline again."""
        self._until_s = time.monotonic() + self._retry_ms / 1000
        self._tries = 0

    @property
    def left_ms(self) -> int:
        """The remaining time for retries; 0 if none is left."""
        return max(int((self._until_s - time.monotonic()) * 1000), 0)

    def pause(self, failure: QmqError) -> None:
        """Wait before the next try. Raises the failure if no time is left."""
        if not self.left_ms:
            raise failure
        longest_s = min(PAUSE_S_MIN * 2**self._tries, PAUSE_S_MAX)
        self._tries += 1
        time.sleep(min(random.uniform(0, longest_s), self.left_ms / 1000))  # noqa: S311 - jitter, not a secret
