"""The table of finished messages as text: the command line shows what is used, and drivers get what
they want.
"""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from qmq.cli.app import app
from qmq.errors import InvalidArgument
from qmq.sql.connection import prepared
from qmq.sql.dedup_records import statements_for
from qmq.sql.dedup_tables import Record, migration
from qmq.sql.dialects import DIALECTS, PARAMSTYLES


def test_the_command_line_prints_the_table() -> None:
    printed = CliRunner().invoke(
        app, ["dedup", "migration", "--dialect", "mariadb", "--table", "shop.done"]
    )
    assert printed.exit_code == 0
    assert printed.stdout == migration("mysql", "shop.done")
    refused = CliRunner().invoke(app, ["dedup", "migration", "--dialect", "oracle"])
    assert refused.exit_code != 0
    assert "E102" in refused.output


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("paramstyle", PARAMSTYLES)
def test_every_way_of_writing_parameters_gets_its_own(dialect: str, paramstyle: str) -> None:
    statements = statements_for(dialect, "qmq_dedup")
    found = prepared(statements.still_there, dialect, paramstyle)
    parameters = found.parameters(statements.parameters(Record("g", "s", "m", "t")))
    mark = {
        "qmark": "?",
        "format": "%s",
        "numeric": ":2",
        "named": ":of_subject",
        "pyformat": "%(of_subject)s",
    }[paramstyle]
    assert re.search(rf"subject = (unhex\()?{re.escape(mark)}", found.text)
    assert len(parameters) == (5 if paramstyle in ("named", "pyformat") else 4)
    assert isinstance(parameters, dict if paramstyle in ("named", "pyformat") else tuple)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_statement_contains_placeholders_of_a_driver(dialect: str) -> None:
    statements = statements_for(dialect, "qmq_dedup")
    for said in (
        statements.add,
        statements.still_there,
        statements.touch,
        statements.expiring,
        statements.expire,
    ):
        text = prepared(said, dialect, "named").text
        bare = re.sub(r":[a-z_0-9]+", "", text)
        assert not set("%?:") & set(bare), text


def test_a_record_for_mysql_travels_as_bytes_of_utf_8() -> None:
    found = statements_for("mysql", "t").parameters(Record("g", "s", "ä", "t").check_width())
    assert bytes.fromhex(found["of_message"]) == "ä".encode()


@pytest.mark.parametrize("dialect", ["", "SQLite", "mssql"])
def test_an_unknown_kind_of_database_is_refused(dialect: str) -> None:
    with pytest.raises(InvalidArgument, match="mariadb"):
        statements_for(dialect, "t")
