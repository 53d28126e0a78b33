"""Process settings of nodes, and of programs that `qmq.run` runs. A library must not change them."""

from __future__ import annotations

import gc
import sys
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
SWITCH_INTERVAL_S: Final = 0.0005
"""The longest time that a thread that finished a flush waits for the interpreter; Python's default is 5 ms."""

_KEEP_BYTES: Final = 1 << 30
_TOP_PAD_BYTES: Final = 16 << 20


def calm_collector() -> None:
    """Make the cyclic garbage collector run rarely, and never over existing objects: a broker's objects die by reference count, and walking
    those of ten thousand queues takes as long as a hundred batches.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks: returning each to the kernel and faulting it in again costs a third of the speed."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # imported here, because a client that does not use `qmq.run` needs none of it

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)


def tune_process() -> None:
    """Make the settings of every broker process."""
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
