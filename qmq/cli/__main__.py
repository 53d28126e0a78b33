"""`python -m qmq.cli` is `qmq`."""

from qmq.cli.main import main

main()
