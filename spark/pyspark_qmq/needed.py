"""Imported before the rest by what Spark's Python processes load: one sentence if this Python lacks
a package. Without PYSPARK_PYTHON, Spark runs the first `python3` on PATH, which is often another
one than the driver's.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

PACKAGES: Final = ("google_crc32c", "grpc", "numpy", "pyarrow", "tenacity")
"""What a task imports besides PySpark; `qmq[spark]` brings them."""

_missing: Final = [name for name in PACKAGES if find_spec(name) is None]
if _missing:
    raise ImportError(
        f"the Python that Spark runs, {sys.executable} ({sys.version_info[0]}."
        f"{sys.version_info[1]}), has no {', '.join(_missing)}: set PYSPARK_PYTHON to the driver's "
        "Python before the session starts, or pip install 'qmq[spark]' there"
    )
