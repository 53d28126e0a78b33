"""The options of each shard, and the broker groups that a broker's name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.cli.broker import BrokerOptions, shard_command, shard_options
from qmq.errors import InvalidArgument
from qmq.process.description import family_of, shards_of

OPTIONS = BrokerOptions(
    group="g1",
    replica="a",
    data=Path("/d"),
    etcd="e:1",
    etcd_password="hunter2",
    metrics_port=9464,
    audit_log=Path("/l/audit.jsonl"),
    shards=3,
)


def test_each_shard_has_a_group_a_folder_and_ports_of_its_own() -> None:
    third = shard_options(OPTIONS, 3)
    assert third.group == "g1.3"
    assert third.data == Path("/d/shard-3")
    assert third.audit_log == Path("/l/audit.3.jsonl")
    assert third.data_port == 20901
    assert third.control_port == 20902
    assert third.metrics_port == 9484
    assert third.shards == 1
    assert (third.replica, third.etcd) == ("a", "e:1")


def test_a_port_that_is_free_or_left_out_stays_so() -> None:
    found = shard_options(BrokerOptions(data_port=0, control_port=0), 9)
    assert (found.data_port, found.control_port, found.metrics_port) == (0, 0, None)


def test_shards_beyond_the_last_port_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="fewer shards"):
        shard_options(BrokerOptions(data_port=65_530), 2)


def test_a_shards_secrets_are_not_in_its_command_line() -> None:
    command = shard_command(
        shard_options(OPTIONS, 1), {"PATH": "/bin", "QMQ_SHARDS": "3", "QMQ_ETCD_USER": "left over"}
    )
    assert "hunter2" not in command.arguments
    assert command.environment["QMQ_ETCD_PASSWORD"] == "hunter2"
    assert command.environment["PATH"] == "/bin"
    assert command.environment["QMQ_SHARDS"] == "1", "a shard has no shards"
    assert "QMQ_ETCD_USER" not in command.environment, (
        "the options of the whole hold, not its environment"
    )
    assert command.arguments[4:8] == ("--group", "g1.1", "--replica", "a")


def test_a_brokers_name_means_all_its_shards_in_order() -> None:
    groups = ["g1.10", "g1.2", "g1.1", "g10.1", "g1.x", "g2"]
    assert shards_of("g1", groups) == ["g1.1", "g1.2", "g1.10"]
    assert shards_of("g1.2", groups) == ["g1.2"]
    assert shards_of("g2", groups) == ["g2"]
    with pytest.raises(InvalidArgument, match="there is no broker group 'g3'"):
        shards_of("g3", groups)


def test_a_broker_group_that_is_not_a_shard_is_its_own_family() -> None:
    assert (
        " ".join(family_of(each) for each in ("g1.2", "g1", "eu.west", "g1.2.3"))
        == "g1 g1 eu.west g1.2"
    )
