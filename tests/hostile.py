"""Hostile text from programs and strangers. Where it is shown it must have no effect: no markup in a page, no control in a terminal.

The console and the command line share this list. Add any text here that breaks one of them.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

CLIPBOARD: Final = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[31mred"
"""Sets a terminal's clipboard and colour."""
MARKUP: Final = (
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "' onmouseover='window.hacked=1",
    "</pre></details><svg onload=window.hacked=1>",
    "javascript:window.hacked=1",
    "{{ 7 * 7 }}${7*7}<%= 7 %>",
    "<a href='javascript:window.hacked=1' autofocus onfocus=window.hacked=1>x</a>",
    "</title></textarea></script><iframe srcdoc='<script>parent.hacked=1</script>'>",
    "<base href=//example.invalid/><meta http-equiv=refresh content='0;url=//example.invalid'>",
    "-->]]><style>*{display:none}</style><form action=//example.invalid><button>",
    "&lt;b&gt; &#x3c;i&#x3e; %3Cscript%3Ewindow.hacked=1%3C/script%3E",
)
CONTROLS: Final = (
    CLIPBOARD,
    "\u202egnp.exe\x1b[31m\x00",
    "\x9b31m\r\n\x85\u2028data: {}\n\nevent: failure",
    "\u2066a\U000e0041\ufeff\u200b",
    "[bold red]rich[/] \\x1b[0m",
)
TEXTS: Final = (*MARKUP, *CONTROLS)
NAMES: Final = (*TEXTS, "../../etc/passwd", "a/b?c=d#e", "a b", "")
"""Not one is a valid name of a subject, a group or a client."""
BODIES: Final = (
    *(text.encode() for text in TEXTS),
    json.dumps({text: text for text in TEXTS}).encode(),
    json.dumps({text: text for text in TEXTS}, ensure_ascii=False).encode(),
    msgspec.msgpack.encode([{text: text} for text in TEXTS]),
    b"\xff\xfe" + MARKUP[0].encode(),
    b'{"' + MARKUP[0].encode(),
)
