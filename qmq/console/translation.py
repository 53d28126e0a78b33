"""Sentences that other parts of QMQ make in English, in the language of a page: findings, and the life of a message. Pure.

words/said.LANGUAGE.json maps English sentences to sentences of the language. `{}` stands for a value, `{#}` for a number, in the same order
in both. A value in the catalog, such as "5 messages", is translated too. Sentences that are not in the catalog stay in English.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Final

CHARS_MAX: Final = 1_000
"""Longer texts, such as an error with a stack trace, are not translated."""
_VALUES: Final = {"{}": "(.+?)", "{#}": r"([\d.,]+)"}
_SEPARATOR, _CHINESE_SEPARATOR = "; ", "\N{FULLWIDTH SEMICOLON}"
_Pattern = tuple[re.Pattern[str], str]


@cache
def patterns(language: str) -> tuple[_Pattern, ...]:
    """The catalog of a language, in the order of the file: the first sentence that fits counts."""
    path = files("qmq.console") / "words" / f"said.{language}.json"
    if not path.is_file():
        return ()
    texts: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return tuple([(_compiled(english), text) for english, text in texts.items()])


def _compiled(english: str) -> re.Pattern[str]:
    parts = [_VALUES.get(part, re.escape(part)) for part in re.split(r"(\{#?\})", english)]
    return re.compile("".join(parts))


def translated(text: str, language: str) -> str:
    """The sentence in the language; sentences joined by semicolons are translated one by one."""
    known = patterns(language)
    return _translated(text, known) if known and len(text) <= CHARS_MAX else text


def _translated(text: str, known: tuple[_Pattern, ...]) -> str:
    for pattern, wanted in known:
        found = pattern.fullmatch(text)
        if found is not None:
            return _filled(wanted, [_translated(value, known) for value in found.groups()])
    parts = text.split(_SEPARATOR)
    return text if len(parts) == 1 else _CHINESE_SEPARATOR.join([_translated(part, known) for part in parts])


def _filled(wanted: str, values: list[str]) -> str:
    first, *rest = wanted.split("{}")
    return first + "".join([value + text for value, text in zip(values, rest, strict=True)])
