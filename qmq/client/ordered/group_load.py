"""What one ordered producer has unanswered at one broker group. Pure.

The partitions of a group are written by one broker to one log, so a producer that keeps that broker busy gains nothing by sending small
batches to each partition in turn. Up to `messages_light` messages and `bytes_light` bytes the group counts as lightly loaded.
"""

from __future__ import annotations


class GroupLoad:
    """Shared by the streams of one broker group. Each try of a batch is counted by `sent`, and again by `answered`."""

    def __init__(self, messages_light: int, bytes_light: int) -> None:
        self._messages_light, self._bytes_light = messages_light, bytes_light
        self.messages = 0
        self.bytes = 0

    def sent(self, messages: int, size: int) -> None:
        """A batch was sent."""
        self.messages += messages
        self.bytes += size

    def answered(self, messages: int, size: int) -> None:
        """A try was answered, or will get no answer."""
        self.messages -= messages
        self.bytes -= size

    @property
    def is_light(self) -> bool:
        """Whether another small batch would not wait long behind what is there."""
        return self.messages <= self._messages_light and self.bytes <= self._bytes_light
