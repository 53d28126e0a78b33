"""Maps the names of RocketMQ topics and consumer groups to QMQ's names. Pure.

    topic `orders`                        subject `orders`
    topic `orders` of namespace `shop`    subject `shop.orders`

The name of a RocketMQ topic has no dot, so the dot separates the namespace. The same applies to names of groups.
"""

from __future__ import annotations

from typing import Any, Final

from qmq.errors import InvalidName
from qmq.gateway.status_codes import Refused
from qmq.model import check_name
from qmq.proto.rocketmq import definition_pb2 as api

SEPARATOR: Final = "."


def subject_of_topic(topic: api.Resource) -> str:
    """The QMQ subject of a topic. Raises Refused."""
    try:
        return _joined("subject", topic)
    except InvalidName as failure:
        raise Refused(api.ILLEGAL_TOPIC, failure.message) from failure


def group_of_resource(group: api.Resource) -> str:
    """The QMQ name of a consumer group. Raises Refused."""
    try:
        return _joined("group", group)
    except InvalidName as failure:
        raise Refused(api.ILLEGAL_CONSUMER_GROUP, failure.message) from failure


def name_of(kind: Any, number: int) -> str:
    """The name of a value of an enum of RocketMQ's protocol; the number itself if this release does not know it."""
    return str(kind.Name(number)) if number in kind.values() else str(number)


def _joined(kind: str, resource: api.Resource) -> str:
    parts = [each for each in (resource.resource_namespace, resource.name) if each]
    return check_name(kind, SEPARATOR.join(parts) if resource.name else "")


def topic_of_subject(subject: str) -> api.Resource:
    """The inverse of `subject_of_topic`."""
    namespace, _, name = subject.rpartition(SEPARATOR)
    return api.Resource(resource_namespace=namespace, name=name)
