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
OPENBLAS_NUM_THREADS: Final = "OPENBLAS_NUM_THREADS"


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--version"]:  # scripts ask for it: without the libraries of the commands
        sys.stdout.write(f"{qmq.__version__}\n")
        return
    # The start makes some hundred thousand objects and no garbage: looking for garbage would take a
    # fifteenth of it. The command begins with the collector (qmq/cli/added_options.py).
    gc.disable()
    # gRPC reads this variable when it is imported. Otherwise gRPC writes a line to standard error
    # for each failed TLS handshake.
    os.environ.setdefault(GRPC_VERBOSITY, "ERROR")
    # NumPy's library of linear algebra reads this one, and otherwise starts a thread for each
    # processor, which spins for a while. QMQ does no linear algebra.
    os.environ.setdefault(OPENBLAS_NUM_THREADS, "1")
    try:
        from qmq.cli.app import app
    except ImportError as cause:
        sys.exit(missing(cause))
    app()
