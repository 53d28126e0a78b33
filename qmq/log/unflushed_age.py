"""The age of the oldest unflushed append: what a power cut may take."""

from __future__ import annotations

from collections import deque


class Unflushed:
    """Keeps one time for each running flush, and one for later appends."""

    __slots__ = ("_is_open", "_marks")

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque()
        """(index, time) of the first append after the beginning of each flush."""
        self._is_open = False
        """Whether the last mark covers current appends."""

    def wrote(self, index: int, now_ms: int) -> None:
        """Entries were appended, from `index` on."""
        if not self._is_open:
            self._marks.append((index, now_ms))
            self._is_open = True

    def begun(self) -> None:
        """A flush has begun; it does not cover later appends."""
        self._is_open = False

    def flushed(self, index: int) -> None:
        """Everything up to `index` is flushed."""
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= index + 1:
            marks.popleft()
        if marks and not self._is_open and len(marks) == 1 and marks[0][0] <= index:
            marks.clear()

    def clear(self) -> None:
        """Nothing is left unflushed."""
        self._marks.clear()
        self._is_open = False

    def age_ms(self, now_ms: int) -> int:
        """How long ago the oldest unflushed entry was written; 0 if there is none."""
        return max(now_ms - self._marks[0][1], 0) if self._marks else 0
