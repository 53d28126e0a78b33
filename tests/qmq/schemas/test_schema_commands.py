"""`qmq subject schema` as a user types it, and the check at the producer, on a real node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support import NodeProcess
from typer.testing import CliRunner, Result

import qmq
from qmq.cli.app import app
from qmq.errors import InvalidArgument, SchemaMismatch
from qmq.schemas.declared_schema import SchemaFormat
from qmq.schemas.schema_check import SchemaCheck

pytestmark = pytest.mark.sampled


@pytest.fixture
def server(node_process: NodeProcess) -> str:
    node_process.start()
    return node_process.address


def typed(server: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["subject", "schema", *words, "--server", server])


def declared(path: Path, **properties: object) -> str:
    path.write_text(json.dumps({"type": "object", "properties": properties, "required": ["id"]}))
    return str(path)


def test_a_schema_is_set_listed_shown_and_deleted(server: str, tmp_path: Path) -> None:
    CliRunner().invoke(app, ["subject", "create", "orders", "--server", server])
    first = declared(tmp_path / "1.json", id={"type": "integer"})
    second = declared(tmp_path / "2.json", id={"type": "integer"}, note={"type": "string"})
    assert (
        typed(server, "set", "orders", "--json-schema", first).stdout
        == "the schema is version 1 of orders\n"
    )
    assert (
        typed(server, "set", "orders", "--json-schema", second, "--dry-run").stdout
        == "the schema would be version 2 of orders\n"
    )
    typed(server, "set", "orders", "--json-schema", second)
    rows = json.loads(typed(server, "list", "orders", "--json").stdout)
    assert [(each["version"], each["format"], each["fields"]) for each in rows] == [
        (1, "json-schema", "id"),
        (2, "json-schema", "id,note"),
    ]
    assert typed(server, "show", "orders").stdout == Path(second).read_text() + "\n"
    assert (
        typed(server, "show", "orders", "--version", "1").stdout == Path(first).read_text() + "\n"
    )
    refused = typed(
        server,
        "set",
        "orders",
        "--json-schema",
        declared(tmp_path / "3.json", id={"type": "string"}),
    )
    assert refused.exit_code == 2
    assert "field 'id' changes from long to string: give the field another name" in refused.stderr
    assert (
        typed(server, "delete", "orders").stdout == "deleted 2 versions of the schema of orders\n"
    )
    assert "has no schema" in typed(server, "list", "orders").stderr


def test_a_python_type_is_declared_by_its_name(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CliRunner().invoke(app, ["subject", "create", "orders", "--server", server])
    (tmp_path / "shop_types.py").write_text(
        "import msgspec\nclass Order(msgspec.Struct):\n    id: int\n    note: str | None = None\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert (
        typed(server, "set", "orders", "--type", "shop_types:Order").stdout
        == "the schema is version 1 of orders\n"
    )
    assert json.loads(typed(server, "list", "orders", "--json").stdout)[0]["fields"] == "id,note"
    missing = typed(server, "set", "orders", "--type", "shop_types:Nothing")
    assert (missing.exit_code, "type that can be imported from here" in missing.stderr) == (2, True)


async def test_a_message_that_does_not_fit_is_refused_at_the_producer(
    node_process: NodeProcess,
) -> None:
    node_process.start()
    schema = json.dumps(
        {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
    )
    async with qmq.connect(node_process.address) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig("orders"))
        with pytest.raises(InvalidArgument, match="has no schema"):
            await SchemaCheck.load(node_process.address, ["orders"])
        await mq.metadata.set_subject_schema("orders", SchemaFormat.JSON_SCHEMA, schema)
    check = await SchemaCheck.load(node_process.address, ["orders"])
    async with qmq.connect(node_process.address, interceptors=[check]) as mq:
        with pytest.raises(
            SchemaMismatch,
            match=(
                r"the message does not fit version 1 of the schema of 'orders' and was not sent: "
                r".*`id`"
            ),
        ):
            await mq.send("orders", b"{}")
        async with mq.producer("orders") as producer:
            with pytest.raises(SchemaMismatch, match="message 1 of 2 does not fit"):
                producer.send_many([b'{"id":1}', b'{"id":"2"}'])
            await producer.send(b'{"id":3}')
        await mq.send("others", b"anything")
        (stored,) = (await mq.metadata.list_subjects("orders"))[0].queues
    assert stored.next_sequence == 1
