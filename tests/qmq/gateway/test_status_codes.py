"""The table of status codes in docs/ROCKETMQ.md, held to the gateway's code."""

from __future__ import annotations

import re
from pathlib import Path

import qmq.gateway
from qmq.proto.rocketmq import definition_pb2 as api

PAGE = Path(__file__).resolve().parents[3] / "docs" / "ROCKETMQ.md"


def documented() -> set[int]:
    """The codes of the table, in which `40004 to 40007` is a range."""
    table = PAGE.read_text().partition("## Status codes")[2].partition("\n## ")[0]
    found: set[int] = set()
    for cell in re.findall(r"^\| ([^|]*\d{5}[^|]*) \|", table, re.MULTILINE):
        for first, last in re.findall(r"(\d{5})(?: to (\d{5}))?", cell):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def test_the_page_has_every_code_that_the_gateway_answers() -> None:
    source = "".join(each.read_text() for each in Path(qmq.gateway.__path__[0]).glob("*.py"))
    named = set(re.findall(r"\bapi\.([A-Z_]+)\b", source)) & set(api.Code.keys())
    assert {number for number in documented() if number not in api.Code.values()} == set()
    assert {name for name in named - {"OK"} if api.Code.Value(name) not in documented()} == set()
