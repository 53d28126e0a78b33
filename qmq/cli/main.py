"""The command line's door: `qmq`. Needs `pip install qmq[cli]`, and `qmq[server]` to run a node."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from qmq.cli.app import app
    except ImportError as cause:
        sys.exit(f"the qmq command needs more libraries ({cause.name} is missing): pip install 'qmq[cli,server]'")
    app()
