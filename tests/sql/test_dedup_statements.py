"""The table of finished messages as text: the docs and the command line show what is used, and drivers get what they want."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qmq.cli.app import app
from qmq.errors import InvalidArgument
from qmq.sql.dedup_statements import DIALECTS, Record, migration, statements, styled

_DOCS = Path(__file__).parents[2] / "docs" / "DEDUP.md"


def test_the_docs_show_the_table_as_it_is() -> None:
    shown = re.findall(r"```sql\n(.*?)```", _DOCS.read_text(), re.DOTALL)
    assert shown == [migration(dialect) for dialect in DIALECTS]


def test_the_command_line_prints_the_table() -> None:
    printed = CliRunner().invoke(app, ["dedup", "migration", "--dialect", "mariadb", "--table", "shop.done"])
    assert printed.exit_code == 0
    assert printed.stdout == migration("mysql", "shop.done")
    refused = CliRunner().invoke(app, ["dedup", "migration", "--dialect", "oracle"])
    assert refused.exit_code != 0
    assert "E102" in refused.output


def test_every_way_of_writing_parameters_gets_its_own() -> None:
    said = "A = :group AND B = :id OR A = :group"
    assert styled(said, "qmark") == ("A = ? AND B = ? OR A = ?", ["group", "id", "group"])
    assert styled(said, "format") == ("A = %s AND B = %s OR A = %s", ["group", "id", "group"])
    assert styled(said, "numeric") == ("A = :1 AND B = :2 OR A = :3", ["group", "id", "group"])
    assert styled(said, "named") == (said, None)
    assert styled(said, "pyformat") == ("A = %(group)s AND B = %(id)s OR A = %(group)s", None)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_statement_holds_what_a_driver_takes_for_its_own(dialect: str) -> None:
    spoken = statements(dialect, "qmq_dedup")
    for said in (spoken.add, spoken.still_there, spoken.touch, spoken.expiring, spoken.expire):
        bare = re.sub(r":[a-z]+", "", said)
        assert not set("%?:") & set(bare), said


def test_a_record_for_mysql_travels_as_bytes_of_utf_8() -> None:
    found = statements("mysql", "t").parameters(Record("g", "s", "ä", "t").check_width())
    assert bytes.fromhex(found["id"]) == "ä".encode()


@pytest.mark.parametrize("dialect", ["", "SQLite", "mssql"])
def test_a_database_that_is_not_known_is_refused(dialect: str) -> None:
    with pytest.raises(InvalidArgument, match="mariadb"):
        statements(dialect, "t")
