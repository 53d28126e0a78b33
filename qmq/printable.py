"""Text that others wrote, for a terminal. Pure.

A nack's error, a pause's reason, a body may hold anything: ESC sequences that set the clipboard or the colours, characters that turn the
order of what follows round. Shown as `\\x1b`, `\\u202e` they do nothing.
"""

from __future__ import annotations

import unicodedata
from typing import Final

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_JOINERS: Final = "\u200c\u200d"
"""Scripts and emoji need them, and they act on their neighbours only."""
KEPT: Final = frozenset("\n\t" + _JOINERS)


def visible(text: str, kept: frozenset[str] = KEPT) -> str:
    """The text with control and format characters, and lone surrogates, written as escapes; but those `kept`."""
    if text.isprintable():
        return text
    return "".join([each if each in kept or unicodedata.category(each) not in _HIDDEN else _escaped(each) for each in text])


def _escaped(each: str) -> str:
    number = ord(each)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
