"""The entry point of the command line, `qmq`. Needs `pip install qmq[cli]`, and `qmq[server]` to
run a node.
"""

from __future__ import annotations

import os
import sys
from typing import Final

GRPC_VERBOSITY: Final = "GRPC_VERBOSITY"


def main() -> None:
    """Run the command line."""
    # gRPC reads this variable when it is imported. Otherwise gRPC writes a line to standard error
    # for each failed TLS handshake.
    os.environ.setdefault(GRPC_VERBOSITY, "ERROR")
    try:
        from qmq.cli.app import app
    except ImportError as cause:
        sys.exit(
            f"the qmq command needs another package ({cause.name} is missing): pip install "
            "'qmq[cli,server]'"
        )
    app()
