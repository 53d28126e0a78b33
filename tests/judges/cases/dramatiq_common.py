"""What Dramatiq's tests take from a module `common` that its source distribution lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from dramatiq import Worker


@contextmanager
def worker(*arguments: Any, **options: Any) -> Iterator[Worker]:
    """A worker that runs."""
    made = Worker(*arguments, **options)
    made.start()
    try:
        yield made
    finally:
        made.stop()


skip_in_ci = skip_on_windows = skip_on_pypy = skip_with_gevent = pytest.mark.skipif(
    False, reason="it runs"
)

RABBITMQ_CREDENTIALS = None
