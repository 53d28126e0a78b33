"""The console's words: both languages have each key, and templates use no other."""

from __future__ import annotations

import re
import string
from pathlib import Path

import qmq.console
from qmq.console.wording import (
    CHARS_MAX,
    LANGUAGES,
    Wording,
    bytes_text,
    catalog,
    chosen_language,
    count_text,
    exact_time,
    patterns,
    translated,
)
from qmq.operations.messages import WHAT

FOLDER = Path(qmq.console.__file__).parent
USED = re.compile(r"""(?:\bt|words|\(request\))\(\s*["']([\w.]+)["']""")
MADE = {
    "age.",
    "route.",
    "lanes.key_",
    "job.",
    "letters.chosen",
    "form.",
    "severity.",
    "sort.",
    "span.",
    "nav.",
}
"""Keys that code puts together."""


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_each_key_is_in_both_languages_with_the_same_values() -> None:
    english, chinese = (catalog(each) for each in LANGUAGES)
    assert english.keys() == chinese.keys()
    for key, text in english.items():
        assert placeholders(text) == placeholders(chinese[key]), key
        assert text, key
        assert chinese[key], key


def test_pages_use_keys_that_are_there_and_all_of_them() -> None:
    sources = "".join(
        path.read_text() for path in (*FOLDER.glob("templates/*.html"), *FOLDER.rglob("*.py"))
    )
    used = {key for key in USED.findall(sources) if not key.endswith(".")}
    known = set(catalog("en"))
    assert used <= known, sorted(used - known)
    unused = {key for key in known - used if not any(key.startswith(made) for made in MADE)}
    assert not unused, sorted(unused)


def test_the_language_is_of_the_address_then_the_cookie_then_the_browser() -> None:
    assert chosen_language("zh", "en", "en") == "zh"
    assert chosen_language("xx", "zh", "en") == "zh"
    assert chosen_language("", "", "fr, zh-TW;q=0.5, en") == "zh"
    assert chosen_language("", "", "") == "en"


def test_numbers_and_times_are_written_for_people() -> None:
    words = Wording("en")
    assert (
        " ".join(count_text(each) for each in (0, 1234567, 0.25, 1234.6)) == "0 1,234,567 0.2 1,235"
    )
    assert [bytes_text(each) for each in (12, 2048, 3 << 30)] == ["12 B", "2.0 KiB", "3.0 GiB"]
    assert words.ago(1_000, 61_000) == "1 min ago"
    assert words.ago(90_000_000, 0) == "in 1 d"
    assert words.ago(0, 5) == "-"
    assert exact_time(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert exact_time(1 << 62) == ""


def test_each_translated_sentence_keeps_the_number_of_its_values() -> None:
    for pattern, text in patterns("zh"):
        assert text.count("{}") == pattern.groups, text


def test_the_story_of_a_message_is_in_the_language_of_the_page() -> None:
    told = "Group billing: waits behind 1,204 older messages; none of its consumers is here."
    assert (
        Wording("zh").said(told) == "消费组 billing：前面还有 1,204 条较旧的消息；没有消费者在线。"  # noqa: RUF001
    )
    assert Wording("en").said(told) == told
    where = "Message 0a: stored on g1 as 4711 of orders at 2023-11-14T22:13:19.990+00:00."
    assert (
        Wording("zh").said(where)
        == "消息 0a：存储在 g1，序号 4711，主题 orders，时间 2023-11-14T22:13:19.990+00:00。"  # noqa: RUF001
    )
    for event in WHAT.values():
        assert translated(event, "zh") != event, event


def test_a_sentence_without_a_translation_stays_english() -> None:
    for text in ("no stock", "<script>alert(1)</script>", "has " * CHARS_MAX):
        assert translated(text, "zh") == text
