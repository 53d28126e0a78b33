"""What a broker group says of its state is committed: no later master denies it."""

from __future__ import annotations

import ast
import asyncio
import inspect

from qmq.broker import control
from qmq.client.client import Client
from qmq.errors import QmqError
from qmq.model import SubjectConfig
from qmq.testing import TestCluster

CHANGES = {
    "ResetGroup",
    "DeleteGroup",
    "DropSubject",
    "PurgeSubject",
    "Seal",
    "PlaceLanes",
    "InheritParked",
    "Unpark",
}
"""These wait for the commit of their own changes."""
REPLICA = {
    "DescribeReplica",
    "Transfer",
    "ReadLog",
    "HoldWrites",
    "DescribeHold",
    "ReleaseWrites",
    "ChangeReplicas",
    "ConfirmClock",
}
"""These are about this replica itself; what they tell of a log is not a decision, or is limited to
what is committed.
"""


def test_every_answer_from_a_brokers_state_waits_for_its_commit() -> None:
    (service,) = ast.parse(inspect.getsource(control.ControlService)).body
    assert isinstance(service, ast.ClassDef)
    methods = [each for each in service.body if isinstance(each, ast.AsyncFunctionDef)]
    kinds = {
        each.name: {
            decorator.id for decorator in each.decorator_list if isinstance(decorator, ast.Name)
        }
        for each in methods
    }
    assert {name for name, found in kinds.items() if found == {"answering"}} == CHANGES | REPLICA
    assert {
        name for name, found in kinds.items() if found == {"reading"}
    } == kinds.keys() - CHANGES - REPLICA


async def seen(mq: Client) -> tuple[int, int] | None:
    """The end of the queue, and what the group has left there; None if the broker group does not
    answer.
    """
    try:
        (subject,) = await mq.metadata.list_subjects("s")
        groups = await mq.metadata.describe_groups("s", "g")
    except QmqError:
        return None
    if not subject.queues or not list(groups):
        return None
    return subject.queues[0].next_sequence, next(iter(groups)).settled_before


async def test_nothing_is_told_of_a_message_that_is_stored_and_not_committed() -> None:
    async with TestCluster(brokers=3, delay=False) as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(SubjectConfig("s"))
        await mq.send("s", b"one")
        async with mq.consumer("s", "g") as consumer:
            await (await consumer.pull(1)).ack_sync()
        assert await seen(mq) == (1, 1)
        master = cluster.master()
        for name in cluster.names:
            if name.startswith("broker") and name != master:
                await cluster.kill(name)
        sending = asyncio.create_task(mq.send("s", b"two"))
        try:
            async with asyncio.timeout(60):
                while (
                    found := await seen(mq)
                ) is not None:  # until the group's answer is missing: it has no majority
                    assert found == (1, 1)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
