"""Progress bars on standard error. They are shown only if standard error is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from qmq.cli.output import errors


def progress_of(*columns: ProgressColumn, quiet: bool, transient: bool = True) -> Progress:
    """Bars with these columns. With `transient`, they disappear when they end."""
    return Progress(*columns, console=errors, transient=transient, disable=quiet or not errors.is_terminal)


@contextmanager
def counting(what: str, total: int | None, *, quiet: bool, transient: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar that counts to `total`. The body of the `with` calls the yielded function with the number done so far.

    The total is an estimate, None if it is unknown: what is counted may grow, or a filter may leave some out. When the body ends without an
    error, what was done is the total, so the bar ends full.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_of(*columns, quiet=quiet, transient=transient) as bars:
        task, done = bars.add_task(what, total=total), 0

        def completed(count: int) -> None:
            nonlocal done
            done = count
            bars.update(task, completed=count)

        yield completed
        bars.update(task, completed=done, total=done)
