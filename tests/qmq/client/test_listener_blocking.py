"""Listeners of a program without asyncio."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from datetime import timedelta

import pytest

import qmq
import qmq.blocking
from qmq.errors import InvalidArgument
from qmq.node.dev_node import Node


@dataclass
class Order:
    id: int


class Session:
    pass


def serve(address: str) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    with qmq.blocking.connect(address) as mq:
        with pytest.raises(InvalidArgument, match="no listener"):
            mq.run()
        mq.provide(Session, Session)

        @mq.listener("orders", group="g", concurrency=4, retry_delays=[timedelta(0)])
        def on_order(order: Order, session: Session, context: qmq.Context) -> None:
            seen.append((order.id, context.attempt))
            if (order.id, context.attempt) == (3, 1):
                raise ValueError
            context.mq.send("handled", order)

        @mq.listener("handled", group="g", batch=(100, timedelta(milliseconds=20)))
        def handled(orders: list[Order]) -> None:
            counted.extend(orders)
            if len(counted) == 10:
                mq.stop()

        counted: list[Order] = []
        for number in range(10):
            mq.send("orders", Order(number))
        mq.run()
        assert sorted(each.id for each in counted) == list(range(10))
    return seen


async def test_plain_functions_handle_messages_in_threads_until_they_are_stopped(
    node: Node,
) -> None:
    found: list[list[tuple[int, int]]] = []
    thread = threading.Thread(target=lambda: found.append(serve(node.address)))
    thread.start()
    await asyncio.to_thread(thread.join, 60)
    assert sorted(found[0]) == sorted([*[(number, 1) for number in range(10)], (3, 2)])
