"""docs/reference/rocketmq_clients.md: the calls that each of RocketMQ's clients made of a gateway, and the codes of the answers.

The tests of each client compare its column with the calls that they recorded. With `QMQ_WRITE_CLIENT_TABLE=1` they write the column.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from qmq.gateway.status import AnsweredCall
from qmq.proto.rocketmq import service_pb2 as calls

PAGE: Final = Path(__file__).parents[3] / "docs" / "reference" / "rocketmq_clients.md"
CLIENTS: Final = {"JAVA": "Java 5.2.0", "PYTHON": "Python 5.1.2", "HTTP": "Node 1.0.8", "RUST": "Rust 5.0.0", "GO": "Go 5.1.4", "": "stub"}
"""By the language that a client's header says: the client, as its registry has it. The stub is RocketMQ's API without a client."""
COMMANDS: Final = ("Telemetry: settings", "Telemetry: recover_orphaned_transaction_command")
CALLS: Final = tuple(each.name for each in calls.DESCRIPTOR.services_by_name["MessagingService"].methods if each.name != "Telemetry")
ROWS: Final = (*CALLS, *COMMANDS)
NONE: Final = "-"
HEAD: Final = """# Calls of RocketMQ's clients

The calls that each client made of the gateway in the tests, which write this page, and the codes of
the answers. `-`: the client did not make the call. `MESSAGE_NOT_FOUND`: an empty long poll ended.
[ROCKETMQ](../ROCKETMQ.md) says what the calls do.

"""


def cells_of(counts: Iterable[AnsweredCall], language: str) -> dict[str, str]:
    """A client's column: for each row, the codes of its answers."""
    seen: dict[str, set[str]] = defaultdict(set)
    for each in counts:
        if each.language == language:
            seen[each.call].add(each.code)
    return {row: ", ".join(sorted(seen[row], key=lambda code: (code != "OK", code))) or NONE for row in ROWS}


def read_page() -> dict[str, dict[str, str]]:
    """The page's columns, by the clients' names."""
    lines = [each for each in PAGE.read_text().splitlines() if each.startswith("|")] if PAGE.is_file() else []
    rows = [[cell.strip().strip("`") for cell in each.strip("|").split("|")] for each in lines]
    if not rows:
        return {}
    return {name: {row[0]: row[at] for row in rows[2:]} for at, name in enumerate(rows[0]) if at}


def page_of(columns: dict[str, dict[str, str]]) -> str:
    """The page with these columns."""
    names = list(CLIENTS.values())
    lines = [f"| call | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in ROWS:
        cells = [columns.get(name, {}).get(row, NONE) for name in names]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


def check_column(counts: Iterable[AnsweredCall], language: str) -> None:
    """The client's column on the page is what was seen."""
    name, seen = CLIENTS[language], cells_of(counts, language)
    columns = read_page()
    if os.environ.get("QMQ_WRITE_CLIENT_TABLE"):
        PAGE.write_text(page_of({**columns, name: seen}))
        return
    assert columns[name] == seen, f"run this test with QMQ_WRITE_CLIENT_TABLE=1, and look at what changed in {PAGE}"
