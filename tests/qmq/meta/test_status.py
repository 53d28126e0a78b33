"""`qmq cluster status`: what is made of a description, with replicas that lag, are silent, or
gone.
"""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

from qmq_coordination.etcd.store import EtcdMember
from rich.console import Console
from support import ManualClock

from qmq.cli.cluster import facts, view
from qmq.meta.description import MEMBERS_MS, ClusterDescription
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


def status(name: str, role: str, index: int) -> control.ReplicaStatus:
    return control.ReplicaStatus(
        replica=name,
        role=role,
        epoch=2,
        last_index=index,
        stored_index=index,
        commit_index=index,
        message_position=index * 1000,
        action_position=5,
        is_whole=True,
        is_serving=role == "master",
    )


def described() -> pb.DescribeClusterResponse:
    replicas = [
        pb.ReplicaDescription(
            replica="g1-a", is_present=True, status=status("g1-a", "master", 1_000)
        ),
        pb.ReplicaDescription(replica="g1-b", is_present=True, status=status("g1-b", "slave", 990)),
        pb.ReplicaDescription(replica="g1-c", is_present=True),
        pb.ReplicaDescription(
            replica="g1-d", is_present=True, status=status("g1-d", "slave", 1_002)
        ),
        pb.ReplicaDescription(replica="g1-e"),
    ]
    one = pb.GroupDescription(
        broker_group="g1",
        health="read-only",
        mode="read-only",
        master="g1-a",
        epoch=2,
        voters=["g1-a", "g1-b", "g1-c"],
        learners=["g1-d"],
        replicas=replicas,
    )
    lost = pb.ReplicaDescription(
        replica="g2-a", is_present=True, status=status("g2-a", "polling", 7)
    )
    two = pb.GroupDescription(
        broker_group="g2",
        health="offline",
        mode="read-write",
        epoch=4,
        voters=["g2-a"],
        replicas=[lost],
    )
    return pb.DescribeClusterResponse(groups=[one, two], store_silent_ms=7_000)


def test_lag_is_what_a_replica_lacks_of_its_master_and_unknown_without_one() -> None:
    found = facts(described())
    one, two = found["groups"]
    assert [each.get("lag_entries") for each in one["replicas"]] == [0, 10, None, 0, None]
    assert [each.get("lag_bytes") for each in one["replicas"]] == [0, 10_000, None, 0, None]
    assert [each["vote"] for each in one["replicas"]] == [
        "voter",
        "voter",
        "voter",
        "learner",
        "none",
    ]
    assert (two["replicas"][0]["lag_entries"], two["master"], two["epoch"]) == (None, "", 4)
    assert found["store_silent_ms"] == 7_000


def test_people_see_in_80_columns_who_lags_who_is_silent_and_who_is_gone() -> None:
    file = io.StringIO()
    Console(file=file, width=80).print(view(facts(described()), "no metaserver answers"))
    lines = file.getvalue().splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    assert rows["g1"] == ["read-only", "epoch", "2"]
    assert rows["g1-a"] == ["master", "1,000", "0", "0"]
    assert rows["g1-b"] == ["slave", "990", "10", "10,000"]
    assert rows["g1-c"] == ["does", "not", "answer"]
    assert rows["g1-d"] == ["slave", "1,002", "0", "0", "learner"]
    assert rows["g1-e"] == ["no", "vote:", "not", "a", "member"]
    assert rows["g2"] == ["offline", "epoch", "4"]
    assert rows["g2-a"] == ["polling", "7"]
    assert "no metaserver answers" in file.getvalue()
    assert "silent for 7 s" in file.getvalue()


async def test_etcds_members_are_asked_once_by_all_who_look_at_the_cluster() -> None:
    clock, answers, asked = ManualClock(), asyncio.Event(), list[int]()

    async def members() -> tuple[EtcdMember, ...]:
        asked.append(clock.now_ms)
        await answers.wait()
        return (EtcdMember("etcd0:2379", "3.6.5"),)

    seen: Any = SimpleNamespace(silent_ms=0, cluster="c")
    brokers: Any = None
    description = ClusterDescription(seen, brokers, clock, control.ProcessStatus, members)
    waiting = [asyncio.create_task(description.of_metaserver()) for _ in range(3)]
    await asyncio.sleep(0)
    answers.set()
    assert {each.store_members[0].version for each in await asyncio.gather(*waiting)} == {"3.6.5"}
    await description.of_metaserver()
    assert len(asked) == 1
    clock.now_ms += MEMBERS_MS
    await description.of_metaserver()
    assert len(asked) == 2


def test_the_notes_of_a_status_are_words_without_markup() -> None:
    answer = described()
    answer.groups[0].replicas[0].status.is_serving = False
    answer.groups[0].replicas[1].status.is_whole = False
    file = io.StringIO()
    Console(file=file, width=80).print(view(facts(answer)))
    assert "not serving yet" in file.getvalue()
    assert "may lack entries" in file.getvalue()
    assert "[" not in file.getvalue()
