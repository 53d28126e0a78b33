"""QMQ as a broker of FastStream: `QmqBroker`, `QmqRouter`, publishers, subscribers, requests,
`TestQmqBroker`, AsyncAPI.

    broker = QmqBroker("localhost:20880")
    app = FastStream(broker)

    @broker.subscriber("orders", group="billing")
    async def bill(order: Order) -> None: ...

FastStream's base classes are private (`faststream._internal`) and move from release to release, so
the extra pins 0.7. docs/integrations/faststream.md is the tutorial.

broker            connects, publishes, asks
registrator       makes subscribers and publishers; router and routes
endpoints         subscribers and publishers, and their descriptions in AsyncAPI
messages          received messages, and the answers to requests
sending           commands, encoding and sending
annotations       what handlers ask for by a hint
testing           the test broker
fastapi           the router for FastAPI
"""

from qmq.integrations.faststream.broker import QmqBroker
from qmq.integrations.faststream.messages import QmqMessage
from qmq.integrations.faststream.registrator import QmqPublisher, QmqRoute, QmqRouter
from qmq.integrations.faststream.sending import QmqPublishCommand, QmqResponse
from qmq.integrations.faststream.testing import TestQmqBroker

__all__ = [
    "QmqBroker",
    "QmqMessage",
    "QmqPublishCommand",
    "QmqPublisher",
    "QmqResponse",
    "QmqRoute",
    "QmqRouter",
    "TestQmqBroker",
]
