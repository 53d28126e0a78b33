"""QMQ as a broker of Celery, or of any other program that uses kombu.

    import qmq.integrations.kombu  # makes qmq:// known to kombu

    app = Celery("tasks", broker="qmq://localhost:20880")

A queue is a subject, and all its consumers are one group of the same name.
docs/integrations/celery.md is the tutorial and says how each part of AMQP is kept.
"""

from kombu.transport import TRANSPORT_ALIASES

from qmq.integrations.kombu.channel import Channel
from qmq.integrations.kombu.transport import Transport

TRANSPORT_ALIASES.setdefault("qmq", "qmq.integrations.kombu:Transport")

__all__ = ["Channel", "Transport"]
