"""QMQ as a broker of FastStream: `QmqBroker`, `QmqRouter`, publishers, subscribers, AsyncAPI.

    broker = QmqBroker("localhost:20880")
    app = FastStream(broker)

    @broker.subscriber("orders", group="billing")
    async def bill(order: Order) -> None: ...

FastStream's base classes are private (`faststream._internal`) and move from release to release, so the extra pins 0.7.
docs/integrations/faststream.md is the tutorial.

faststream_broker     connects, publishes; the router
faststream_endpoints  subscribers and publishers, with their descriptions for AsyncAPI
faststream_messages   messages between FastStream and QMQ, both ways
"""

from qmq.integrations.faststream.faststream_broker import QmqBroker, QmqRouter
from qmq.integrations.faststream.faststream_messages import QmqMessage, QmqPublishCommand, QmqResponse

__all__ = ["QmqBroker", "QmqMessage", "QmqPublishCommand", "QmqResponse", "QmqRouter"]
