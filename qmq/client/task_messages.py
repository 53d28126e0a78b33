"""Which messages each task of a consumer works on: an automatic acknowledgement belongs to the task
that got the message.

    a task asks for the next message      the messages that it had when it asked are acknowledged,
                                          and no other task's
    a task asks twice before it awaits    (`gather(anext(it), anext(it))`) it gets two messages; its
                                          next question acknowledges both
    a task ends with an exception         its messages fail with that exception
    a task is cancelled                   its messages go back to the group, and no attempt is
                                          counted
    a task returns                        it may have passed a message on. What has no verdict after
                                          a lease goes back to the group
    the consumer closes                   `close` returns all messages that are left

A task asks when it *calls* `anext`, so that the message belongs to the caller also if another task
awaits the answer for it, as `asyncio.wait_for` has it in Python 3.11, or
`asyncio.create_task(anext(it))`. A thread of the blocking client counts as a task.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

from qmq.client.consuming import TaskHolding

log = logging.getLogger("qmq.client")

T = TypeVar("T")


Owner: TypeAlias = asyncio.Future[Any]
"""A task; or a future that stands for a thread, and is done when the thread has ended."""


class TaskMessages(Generic[T]):
    """The messages of one consumer. `ack` and `abandoned` get messages that may have a verdict
    already. `abandoned` also gets the exception of the task that had the message; None if the task
    was cancelled or returned. A message of a task that returned is abandoned after `grace_s`.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        ack: Callable[[T], object],
        abandoned: Callable[[T, BaseException | None], object],
        grace_s: float = 0.0,
        make: type[TaskHolding] = TaskHolding,
    ) -> None:
        self._name, self._ack, self._abandoned, self._grace_s, self._make = (
            name,
            ack,
            abandoned,
            grace_s,
            make,
        )
        self.loop: Final = loop
        self.tasks: Final = _running_tasks()
        self.task: Final = (
            partial(asyncio.current_task, loop)
            if self.tasks is None
            else partial(self.tasks.get, loop)
        )
        """Returns the running task."""
        self._holdings: dict[Owner | None, TaskHolding] = {}
        self._left: dict[asyncio.TimerHandle, list[T]] = {}
        """Messages of tasks that returned, by the timer that gives them back."""

    def asks(self) -> tuple[TaskHolding, T | None]:
        """The running task asks for the next message:
        pass both to `finish` when it awaits the answer.
        """
        task = self.task()
        holding = self._holdings.get(task) or self.holding(task)
        return holding, holding.message

    def holding(self, owner: Owner | None) -> TaskHolding:
        """What a task holds."""
        found = self._holdings.get(owner)
        if found is None:
            self._holdings[owner] = found = self._make(owner)
            if owner is not None:
                owner.add_done_callback(self._ended)
        return found

    def finish(self, holding: TaskHolding, last: T | None) -> None:
        """Acknowledge the task's messages up to `last`, which was its last one when it asked."""
        held = _taken(holding)
        count = next((index + 1 for index, each in enumerate(held) if each is last), 0)
        for each in held[count:]:
            self.add(holding, each)
        for each in held[:count]:
            self._ack(each)

    def add(self, holding: TaskHolding, message: T) -> None:
        """The task gets a message."""
        if holding.task is None and self._holdings.get(None) is not holding:
            self._leave([message])  # the task has ended, and another one awaited the answer
            return
        if holding.message is not None:
            holding.earlier = [*(holding.earlier or ()), holding.message]
        holding.message = message

    def _ended(self, task: Owner) -> None:
        holding = self._holdings.pop(task)
        holding.task = None
        held = _taken(holding)
        if not held:
            return
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            log.warning(
                "%s: the task that handled %r failed", self._name, held[-1], exc_info=failure
            )
        if failure is not None or task.cancelled():
            for each in held:
                self._abandoned(each, failure)
        else:
            self._leave(held)

    def _leave(self, messages: list[T]) -> None:
        def abandon() -> None:
            for each in self._left.pop(timer):
                self._abandoned(each, None)

        timer = self.loop.call_later(self._grace_s, abandon)
        self._left[timer] = messages

    def take(self) -> list[T]:
        """The messages of the running task, which are its own no more."""
        holding = self._holdings.get(self.task())
        return [] if holding is None else _taken(holding)

    def close(self) -> list[T]:
        """All messages that tasks hold or have left, and no task's any more."""
        left = [message for messages in self._left.values() for message in messages]
        for timer in self._left:
            timer.cancel()
        self._left.clear()
        for owner, holding in self._holdings.items():
            left += _taken(holding)
            if owner is not None:
                holding.task = None
                owner.remove_done_callback(self._ended)
        self._holdings.clear()
        return left


def _running_tasks() -> dict[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None:
    """What `asyncio.current_task` looks up before Python 3.14: its call takes longer than all else
    that is done for a message.
    """
    return getattr(asyncio.tasks, "_current_tasks", None) if sys.version_info < (3, 14) else None


def _taken(holding: TaskHolding) -> list[Any]:
    if holding.message is None:
        return []
    taken = [*(holding.earlier or ()), holding.message]
    holding.message = holding.earlier = None
    return taken


class TaskLoop(Generic[T]):
    """Iterates over what `get` returns. Without `held` nothing is acknowledged."""

    def __init__(self, held: TaskMessages[Any] | None, get: Callable[[], Awaitable[T]]) -> None:
        self._held, self._get = held, get

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    def __anext__(self) -> Awaitable[T]:
        held = self._held
        return self._get() if held is None else self._next(held, *held.asks())

    async def _next(self, held: TaskMessages[Any], holding: TaskHolding, last: T | None) -> T:
        held.finish(holding, last)
        message = await self._get()
        held.add(holding, message)
        return message
