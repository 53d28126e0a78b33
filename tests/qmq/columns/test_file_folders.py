"""The folders that `qmq.path` may name, and their owners."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import node_config, running

from qmq.broker.config import BrokerConfig
from qmq.columns.files.folders import find_folders
from qmq.errors import InvalidArgument

SEGMENT = f"{0:020d}.log"


def store(path: Path, *, is_delay: bool = False) -> Path:
    (path / "message").mkdir(parents=True)
    (path / "message" / SEGMENT).touch()
    (path / "checkpoint").mkdir()
    if is_delay:
        (path / "schedule").mkdir()
    return path


def replica(data: Path, group: str, *, is_delay: bool = False) -> Path:
    store(data / "broker", is_delay=is_delay)
    (data / "replica.json").write_text(
        json.dumps({"crc": 1, "content": json.dumps({"group": group, "replica": "r"})})
    )
    return data


def found(*paths: object, **options: bool) -> list[tuple[str, str]]:
    return [
        (each.broker_group, each.messages.name)
        for each in find_folders([str(path) for path in paths], **options)
    ]


@pytest.mark.parametrize("inner", ["", "broker", "broker/message"])
def test_the_folder_of_a_replica_belongs_to_its_group_under_any_name(
    tmp_path: Path, inner: str
) -> None:
    replica(tmp_path / "r1", "g7")
    assert found(tmp_path / "r1" / inner) == [("g7", "message")]


def test_replicas_are_named_by_globs_and_lists_each_once(tmp_path: Path) -> None:
    for name, group in (("r1", "g1"), ("r2", "g1"), ("r3", "g2")):
        replica(tmp_path / name, group)
    wanted = [("g1", "message"), ("g1", "message"), ("g2", "message")]
    assert found(tmp_path / "r*") == wanted
    assert found(f"{tmp_path}/r1, {tmp_path}/r[12]/broker,{tmp_path}/r3") == wanted
    assert found(tmp_path / "r1", tmp_path / "r2", tmp_path / "r3") == wanted


def test_copies_are_of_the_group_that_their_folder_is_named_after(tmp_path: Path) -> None:
    (tmp_path / "g4").mkdir()
    (tmp_path / "g4" / SEGMENT).touch()
    store(tmp_path / "g5")
    store(tmp_path / "g6" / "broker")
    assert found(tmp_path / "g4") == [("g4", "g4")]
    assert found(tmp_path / "g5") == [("g5", "message")]
    assert found(tmp_path / "g6") == [("g6", "message")]


def test_a_folder_whose_name_is_not_a_group_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "the copies").mkdir()
    (tmp_path / "the copies" / SEGMENT).touch()
    with pytest.raises(InvalidArgument, match="has their broker group's name"):
        found(tmp_path / "the copies")


def test_delay_groups_are_left_out_and_an_empty_result_says_so(tmp_path: Path) -> None:
    replica(tmp_path / "r1", "g1")
    replica(tmp_path / "d1", "delay", is_delay=True)
    assert found(tmp_path / "*") == [("g1", "message")]
    assert found(tmp_path / "*", with_delay=True) == [("delay", "message"), ("g1", "message")]
    with pytest.raises(
        InvalidArgument, match="d1/broker belongs to a delay group: it has pending delayed messages"
    ):
        found(tmp_path / "d1")


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("nowhere", "is not a folder"),
        ("no*", "matches nothing"),
        ("", "has no log"),
        ("  ,", "qmq.path is empty"),
    ],
)
def test_path_that_names_nothing_to_read_is_refused(tmp_path: Path, path: str, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        find_folders([path if path.strip(", ") != path else str(tmp_path / path)])


def test_replica_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    replica(tmp_path / "r1", "g1")
    (tmp_path / "r1" / "replica.json").write_text("{")
    with pytest.raises(
        InvalidArgument, match=r"replica.json does not name the folder's broker group"
    ):
        found(tmp_path / "r1")


async def test_folder_of_a_single_node_is_its_one_brokers_while_it_runs_and_afterwards(
    tmp_path: Path,
) -> None:
    config = replace(
        node_config(tmp_path / "data", broker=BrokerConfig(name="solo"), delay=True),
        delay_group="later",
    )
    async with running(config):
        assert found(tmp_path / "data") == [("solo", "message")]
    assert found(tmp_path / "data") == [("solo", "message")]
    assert found(tmp_path / "data" / "broker") == [("solo", "message")]
    assert found(tmp_path / "data", with_delay=True) == [("solo", "message"), ("later", "message")]
