"""Many messages at a time: a handler that takes a list of payloads.

Rules:
* All messages are acknowledged when the handler returns, and all fail when it raises, each with the delay of its own attempt. The handler
  may settle single messages by `context.messages[3].nack()`.
* A message that cannot be decoded is not in the list, and is settled separately. On an ordered subject, later messages would overtake it,
  so the whole batch fails, unless undecodable messages are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from qmq.client.consuming.message import Message
from qmq.client.consuming.ordered.message import OrderedMessages
from qmq.client.listening.context import GIVEN_BACK, Act, HandlerDecision, Say, decide
from qmq.client.listening.message_handling import MessageHandling, give_back, ordered_delay, say_from_threads
from qmq.client.metadata.cache import is_cancelled_from_outside
from qmq.client.payloads import Undecodable, UndecodableBody


class BatchHandling(MessageHandling):
    async def handle_all(self, messages: Sequence[Message]) -> None:
        """Handle messages of an unordered subject and settle them. Raises only CancelledError."""
        good: list[Any] = []
        payloads: list[Any] = []
        for each in messages:
            try:
                payloads.append(self._payload(each))
                good.append(each)
            except Undecodable as undecodable:
                self.conclude(each, undecodable)
        if not good:
            return
        thread: list[asyncio.Future[Any]] = []
        try:
            failure = await self._outcome(good, payloads, thread)
        except asyncio.CancelledError:
            for each in good:
                give_back(each)
            raise
        if failure is not None:
            self.log(good[0], failure, len(good))
        for each in good:
            self.settle(each, failure)
        await _returned(thread)

    async def handle_run(self, messages: OrderedMessages) -> None:
        """Handle messages of one lane, which succeed or fail together, and settle them. Raises only CancelledError."""
        every = list(messages)
        failure: BaseException | None = None
        thread: list[asyncio.Future[Any]] = []
        try:
            good, payloads = self._decoded(every)
            if good:
                failure = await self._outcome(good, payloads, thread, lambda _, decision: self._say_of_run(messages, decision))
        except Undecodable as undecodable:
            failure = undecodable
        except asyncio.CancelledError:
            messages.fail(GIVEN_BACK.delay, GIVEN_BACK.error)
            raise
        if failure is not None:
            self.log(every[0], failure, len(every))
        _settle_run(messages, decide(failure, messages.attempt, self._policy))
        await _returned(thread)

    def _decoded(self, messages: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Raises Undecodable, unless such messages are skipped."""
        good: list[Any] = []
        payloads: list[Any] = []
        for each in messages:
            try:
                payloads.append(self._payload(each))
                good.append(each)
            except Undecodable as failure:
                if self._policy.on_undecodable != "skip":
                    raise UndecodableBody(f"{each!r}: {failure}") from failure
                self.log(each, failure)
        return good, payloads

    async def _outcome(
        self, messages: Sequence[Any], payloads: list[Any], threads: list[asyncio.Future[Any]], say: Say | None = None
    ) -> BaseException | None:
        """The exception with which the handler ended, or None. Raises CancelledError if the worker is cancelled."""
        context = self._context(messages, say)
        limit = asyncio.timeout(self._timeout_s)
        try:
            with ExitStack() as stack:
                for each in messages:
                    stack.enter_context(self._chain.handling(each, self._group))
                async with limit:
                    if self._binding.is_async:
                        await self._call(payloads, context)
                        return None
                    for each in messages:
                        if isinstance(each, Message):
                            say_from_threads(each, self._loop)
                    threads.append(self._start_thread(self._work_on_all, payloads, context))
                    raised = await asyncio.shield(threads[0])
                    if raised is not None:
                        raise raised
        except asyncio.CancelledError as error:
            if is_cancelled_from_outside():
                raise
            return error
        except Exception as error:
            return self._timed_out() if limit.expired() and isinstance(error, TimeoutError) else error
        return None

    def _say_of_run(self, messages: OrderedMessages, decision: HandlerDecision) -> None:
        if self._binding.is_async:
            _settle_run(messages, decision)
        else:
            self._loop.call_soon_threadsafe(_settle_run, messages, decision)

    def _work_on_all(self, payloads: list[Any], context: Any) -> Exception | None:
        try:
            self._call_in_thread(payloads, context)
        except Exception as failure:
            return failure
        except BaseException as failure:
            return RuntimeError(f"the handler ended its thread with {failure!r}")
        return None


def _settle_run(messages: OrderedMessages, decision: HandlerDecision) -> None:
    """Settle the messages that have no verdict yet."""
    if decision.act is Act.ACK:
        messages.ack_later()
    else:
        messages.fail(ordered_delay(decision), decision.error)


async def _returned(threads: Sequence[asyncio.Future[Any]]) -> None:
    """An abandoned thread keeps its place until it returns."""
    if threads:
        await asyncio.wait(threads)
