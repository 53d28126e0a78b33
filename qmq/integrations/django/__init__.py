"""QMQ in Django: messages in `transaction.atomic()`, listeners as a management command, the outbox
in the admin.

    INSTALLED_APPS = [..., "qmq.integrations.django"]
    QMQ = {"SERVER": "localhost:20880", "OUTBOX": True}

docs/integrations/django.md is the tutorial.
"""

from qmq.integrations.django.sending import client, send
from qmq.integrations.django.subject_listeners import listener

__all__ = ["client", "listener", "send"]
