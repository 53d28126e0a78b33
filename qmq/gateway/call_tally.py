"""Which calls clients made, by the language of the client, and how they were answered. Pure.

Telemetry      each command counts for itself: what the client sent, and what it was sent
the others     by the status of the answer; of a stream, its first
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from qmq.proto.rocketmq import definition_pb2 as api

LANGUAGES_MAX = 32
"""Clients say their language themselves: so many are told apart."""
OTHERS = "OTHER"


class AnsweredCall(NamedTuple):
    """A kind of call and of answer. `language` is what the client's header says, "" without one."""

    call: str
    language: str
    code: str


class CallTally:
    """Of one gateway."""

    def __init__(self) -> None:
        self.counts: Counter[AnsweredCall] = Counter()
        self._languages: set[str] = set()

    def note(self, call: str, language: str, code: api.Code.ValueType) -> None:
        """A call was answered."""
        if language not in self._languages:
            if len(self._languages) >= LANGUAGES_MAX:
                language = OTHERS
            self._languages.add(language)
        self.counts[AnsweredCall(call, language, api.Code.Name(code))] += 1
