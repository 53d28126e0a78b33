"""Annotations for handlers that need the message, the broker or the client.

async def bill(order: Order, message: Message, mq: Client) -> None: ...
"""

from __future__ import annotations

from typing import Annotated

from faststream._internal.context import Context
from faststream.annotations import ContextRepo, Logger
from faststream.params import NoCast

import qmq
from qmq.integrations.faststream.broker import QmqBroker
from qmq.integrations.faststream.messages import QmqMessage

__all__ = ["Broker", "Client", "ContextRepo", "Logger", "Message", "NoCast"]

Message = Annotated[QmqMessage, Context("message")]
Broker = Annotated[QmqBroker, Context("broker")]
Client = Annotated[qmq.Client, Context("broker._connection")]
