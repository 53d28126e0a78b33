"""A server with a planted bug: `python -m campaign.bugs NAME broker --group g1 ...`."""

from __future__ import annotations

import sys

from campaign.table import bugs

if __name__ == "__main__":
    name, *words = sys.argv[1:]
    bugs()[name].plant()
    sys.argv = ["qmq", *words]
    sys.stderr.write(f"planted: {name}\n")
    from qmq.cli.main import main

    main()
