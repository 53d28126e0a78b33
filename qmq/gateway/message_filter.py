"""The filter of a subscription: by tags, or by an SQL92 condition. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq.client.message import StoredMessage
from qmq.gateway.sql_expression import condition_of
from qmq.gateway.tag_expression import tags_of_expression
from qmq.proto.rocketmq import definition_pb2 as api

TAGS: Final = "TAGS"
"""The name of the message's tag in a condition."""


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """A filter by tags or by condition. Empty `tags` accept every tag; an empty `sql` is no condition."""

    tags: tuple[str, ...] = ()
    sql: str = ""

    def __str__(self) -> str:
        if self.sql:
            return f"messages where {self.sql}"
        return f"messages with the tags {' || '.join(self.tags)}" if self.tags else "all messages"

    def wants(self, message: StoredMessage) -> bool:
        """True if the subscription gets the message."""
        if self.tags and not any(tag in self.tags for tag in message.tags):
            return False
        if not self.sql:
            return True
        properties = {name: value.decode(errors="replace") for name, value in message.headers.items()}
        if message.tags:
            properties[TAGS] = message.tags[0]
        return condition_of(self.sql)(properties) is True


def filter_of_request(expression: api.FilterExpression) -> MessageFilter:
    """The filter of a request. Raises Refused."""
    if expression.type != api.SQL:
        return MessageFilter(tags=tags_of_expression(expression.expression))
    condition_of(expression.expression)
    return MessageFilter(sql=expression.expression)
