"""The entry point of the command line, `qmq`. Needs `pip install qmq[cli]`, and `qmq[server]` to
run a node.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

import qmq
from qmq.cli import missing

GRPC_VERBOSITY: Final = "GRPC_VERBOSITY"
GARBAGE_OBJECTS: Final = 100_000
"""The start makes some hundred thousand objects, and no garbage: with Python's threshold of 700,
looking for garbage takes a fifteenth of it.
"""


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--version"]:  # scripts ask for it: without the libraries of the commands
        sys.stdout.write(f"{qmq.__version__}\n")
        return
    gc.set_threshold(GARBAGE_OBJECTS)
    # gRPC reads this variable when it is imported. Otherwise gRPC writes a line to standard error
    # for each failed TLS handshake.
    os.environ.setdefault(GRPC_VERBOSITY, "ERROR")
    try:
        from qmq.cli.app import app
    except ImportError as cause:
        sys.exit(missing(cause))
    app()
