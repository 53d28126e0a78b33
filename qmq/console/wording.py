"""What the console writes: its words in English and in Chinese, numbers and times, and command
lines. Pure.

Catalogs are words/LANGUAGE.json: a text by key, with {names} for values. Each key is in both.

A command line does what a page shows or does. Every argument is quoted for a shell, so that a
copied command is safe with any name or key.

Sentences that other parts of QMQ make in English, findings and the life of a message, are
translated for the language of a page. words/said.LANGUAGE.json maps English sentences to sentences
of the language. `{}` stands for a value, `{#}` for a number, in the same order in both. A value in
the catalog, such as "5 messages", is translated too. Sentences that are not in the catalog stay in
English.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from qmq.process.event_loop import TIME_MS_MAX, TIME_MS_MIN, time_of

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
    return (
        text
        if len(parts) == 1
        else _CHINESE_SEPARATOR.join([_translated(part, known) for part in parts])
    )


def _filled(wanted: str, values: list[str]) -> str:
    first, *rest = wanted.split("{}")
    return first + "".join([value + text for value, text in zip(values, rest, strict=True)])


LANGUAGES: Final = {"en": "English", "zh": "中文"}
_SPANS: Final = (
    (86_400_000, "span.days"),
    (3_600_000, "span.hours"),
    (60_000, "span.minutes"),
    (1_000, "span.seconds"),
)
_BYTES: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@cache
def catalog(language: str) -> Mapping[str, str]:
    """All texts of a language, by key."""
    found: dict[str, str] = json.loads(
        (files("qmq.console") / "words" / f"{language}.json").read_text(encoding="utf-8")
    )
    return found


def chosen_language(asked: str, remembered: str, accepted: str) -> str:
    """The language that the address names, or else a cookie, or else the browser's Accept-Language;
    English otherwise.
    """
    for each in (asked, remembered):
        if each in LANGUAGES:
            return each
    wishes = [part.split(";")[0].strip().lower() for part in accepted.split(",")]
    return next((wish.split("-")[0] for wish in wishes if wish.split("-")[0] in LANGUAGES), "en")


class Wording:
    """The texts of one language, and its form of numbers and times."""

    def __init__(self, language: str) -> None:
        self.language = language
        self._texts = catalog(language)

    def __call__(self, key: str, **values: Any) -> str:
        """The text of a key with its values. Raises KeyError for an unknown key."""
        text = self._texts[key]
        return text.format(**values) if values else text

    def said(self, english: str) -> str:
        """The translation of an English sentence from another part of QMQ,
        as far as it is known.
        """
        return translated(english, self.language)

    def span(self, ms: int) -> str:
        """A length of time in its largest unit."""
        for size, key in _SPANS:
            if ms >= size:
                return self(key, count=f"{ms // size:,}")
        return self("span.ms", count=ms)

    def ago(self, time_ms: int, now_ms: int) -> str:
        """A moment relative to now; "-" for 0."""
        if not time_ms:
            return "-"
        distance_ms = abs(now_ms - time_ms)
        if distance_ms < 1_000:
            return self("span.now")
        return self("span.ago" if time_ms < now_ms else "span.in", span=self.span(distance_ms))


def count_text(number: float) -> str:
    """A number with thousands separators; a float below 10 has one decimal."""
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:,.1f}" if 0 < number < 10 else f"{number:,.0f}"


def bytes_text(size: int) -> str:
    """A size in the largest binary unit that fits."""
    for unit, unit_bytes in _BYTES:
        if size >= unit_bytes:
            return f"{size / unit_bytes:,.1f} {unit}"
    return f"{size:,} B"


def exact_time(time_ms: int) -> str:
    """A moment in UTC as ISO 8601; empty for 0 and for a time outside the calendar."""
    if time_ms == 0 or not TIME_MS_MIN <= time_ms <= TIME_MS_MAX:
        return ""
    return time_of(time_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def command(*words: object, **options: object) -> str:
    """A `qmq` command line. An option that is None, False or empty is left out; True has no value;
    a list repeats the option.
    """
    parts = ["qmq", *map(str, words)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            parts.append(flag)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            for each in value:
                parts += [flag, str(each)]
        elif value is not None and value is not False and value != "":
            parts += [flag, str(value)]
    return shlex.join(parts)
