"""Text from other programs, made safe for a terminal. Pure.

An error of a nack, the reason of a pause or a body may contain ESC sequences that set the clipboard or the colours, or characters that
reverse the order of the text after them. Shown as `\x1b` and `\u202e` they have no effect.
"""

from __future__ import annotations

import unicodedata
from typing import Final

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
JOINERS: Final = frozenset("\u200c\u200d")
"""Scripts and emoji need these characters, which affect only their neighbours."""
KEPT: Final = JOINERS | frozenset("\n\t")


def visible(text: str, kept: frozenset[str] = KEPT) -> str:
    """The text with control and format characters and lone surrogates as escapes; characters in `kept` stay."""
    if text.isprintable():
        return text
    return "".join([each if each in kept or unicodedata.category(each) not in _HIDDEN else _escaped(each) for each in text])


def _escaped(each: str) -> str:
    number = ord(each)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
