"""Code blocks of a Markdown page: reads them, runs them, and compares the output with the page.

    ```python     a program; the ```text block after it is its output. Every block is a separate
                  program
    ```console    lines that begin with "$ " are shell commands; the lines after each are its output
    ```python title="test_it.py"    a file with this name, for the commands after it
    ```sh         commands that are not run: they install, or run until they are stopped

A `python` block without a ```text block must print nothing. `...` stands for omitted output, within
a line or as a separate line. Programs and commands find their server at the address that the test
gives, in place of `localhost:20880`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ADDRESS = "localhost:20880"
FENCED = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[\w.]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A program, a command or a file, and its output. `name` tells the reader of a failure where
    the block is.
    """

    name: str
    language: str
    code: str
    output: str


def blocks_of(page: Path) -> Iterator[Block]:
    """The runnable code blocks of a page, in order."""
    text = page.read_text()
    found = list(FENCED.finditer(text))
    for each, behind in zip_longest(found, found[1:]):
        name = f"{page.name}:{text[: each.start()].count(chr(10)) + 1}"
        if each["title"]:
            yield Block(each["title"], "file", each["text"], "")
        elif each["language"] == "python":
            is_output = behind is not None and behind["language"] == "text"
            yield Block(
                name, "python", each["text"], behind["text"] if is_output and behind else ""
            )
        if each["language"] == "console":
            for command in re.split(r"^\$ ", each["text"], flags=re.MULTILINE)[1:]:
                code, _, output = command.partition("\n")
                yield Block(name, "console", code, output)


def printed_by(block: Block, address: str, folder: Path) -> str:
    """Run a block and return its output: a program runs in this process, a command in the
    folder.
    """
    code = block.code.replace(ADDRESS, address)
    if block.language == "file":
        (folder / block.name).write_text(code)
        return ""
    if block.language == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, block.name, "exec"), {"__name__": "__main__"})
        return printed.getvalue()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "QMQ_SERVER": address, "PATH": path, "COLUMNS": "100"}
    done = subprocess.run(
        ["bash", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{block.name}: {block.code}\n{done.stdout}{done.stderr}"
    return done.stdout


def is_shown(shown: str, printed: str) -> bool:
    """Whether the output equals what the page shows."""
    lines = [
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*?") + r"\n"
        for line in shown.splitlines()
    ]
    return (
        re.fullmatch("".join(lines), "".join(line.rstrip() + "\n" for line in printed.splitlines()))
        is not None
    )


def require_shown(page: Path, address: str, folder: Path) -> None:
    """Run all blocks of a page; fails where one prints something else than the page shows."""
    for block in blocks_of(page):
        printed = printed_by(block, address, folder)
        assert is_shown(block.output, printed), (
            f"{block.name} shows\n{block.output}\nand prints\n{printed}"
        )
