"""Builds the command lines that do what a page shows or does. Pure.

Every argument is quoted for a shell, so that a copied command is safe with any name or key.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def command(*words: object, **options: object) -> str:
    """A `qmq` command line. An option that is None, False or empty is left out; True has no value; a list repeats the option."""
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
