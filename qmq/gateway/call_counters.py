"""Counts calls by the client's language and by the status of the answer. Pure.

Telemetry      each command counts, both sent and received ones
other calls    by the status of the answer; for a stream, of the first answer
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from qmq.proto.rocketmq import definition_pb2 as api

LANGUAGES_MAX = 32
LANGUAGE_CHARS_MAX = 32
"""Clients name their language themselves. The counters count languages beyond this number, and longer names, as OTHER."""
OTHERS = "OTHER"


class AnsweredCall(NamedTuple):
    """A kind of call and of answer. `language` comes from the client's header; it is "" if the header is missing."""

    call: str
    language: str
    code: str


class CallCounters:
    """Counts the calls of one gateway."""

    def __init__(self) -> None:
        self.counts: Counter[AnsweredCall] = Counter()
        self._languages: set[str] = set()

    def note(self, call: str, language: str, code: api.Code.ValueType) -> None:
        """Count one answered call."""
        if language not in self._languages:
            if len(self._languages) >= LANGUAGES_MAX or len(language) > LANGUAGE_CHARS_MAX or not language.isprintable():
                language = OTHERS
            self._languages.add(language)
        self.counts[AnsweredCall(call, language, api.Code.Name(code))] += 1
