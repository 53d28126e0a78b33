"""Values that are taken without pydantic are those that typer makes by it, and what is wrong with
any other value is said by typer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from qmq.cli.plain_values import take_plain_values_below

Words = Annotated[list[str] | None, typer.Argument()]
Port = Annotated[int, typer.Option(min=0, max=65_535)]
Loud = Annotated[bool, typer.Option("--loud", envvar="LOUD")]


def answer(line: str, *, is_plain: bool) -> object:
    """The values of a command with parameters of all kinds, or why typer refuses one."""
    app, found = typer.Typer(), list[Any]()

    @app.command()
    def take(
        words: Words = None,
        name: str = "",
        port: Port = 20880,
        count: int | None = None,
        pause: float = 1.5,
        data: Path = Path("data"),
        place: Path | None = None,
        is_loud: Loud = False,
    ) -> None:
        values = (words, name, port, count, pause, data, place, is_loud)
        found.append([(type(each), each) for each in values])

    command: Any = get_command(app)
    if is_plain:
        take_plain_values_below(command)
    try:
        command.main(line.split(), prog_name="take", standalone_mode=False)
    except typer.BadParameter as refusal:
        return refusal.format_message()
    return found


@pytest.mark.parametrize("variable", ["", "1", "off", "x"])
@pytest.mark.parametrize(
    "line",
    [
        "",
        "a b --name x --port 0 --count -5 --pause 0.25 --data x/y --place z --loud",
        "--port 65535 --count 007",
        "--port 65536",
        "--port -1",
        "--port x",
        "--port 1_0",
        "--count 99999999999999999999",
        "--pause x",
        "--pause 1e3",
        "--data nothing-here --place .",
    ],
)
def test_values_and_refusals_are_those_of_typer(
    line: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOUD", variable)
    assert answer(line, is_plain=True) == answer(line, is_plain=False)
