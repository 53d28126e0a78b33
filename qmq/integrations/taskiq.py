"""QMQ as a broker of Taskiq, and its delayed messages as a schedule source.

    broker = QmqBroker("localhost:20880")
    schedules = QmqScheduleSource(broker)

docs/integrations/taskiq.md is the tutorial.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, timedelta
from typing import Any, Final

from taskiq import (
    AckableMessage,
    AsyncBroker,
    BrokerMessage,
    ScheduledTask,
    ScheduleSource,
    SmartRetryMiddleware,
)
from taskiq.abc.formatter import TaskiqFormatter
from taskiq.message import TaskiqMessage

import qmq
from qmq.errors import InvalidArgument, MessageNotFound, TooLate
from qmq.text import visible

log = logging.getLogger("qmq.taskiq")

DELAY: Final = "delay"
"""The label with the seconds until a task begins."""
RETRIES: Final = "_retries"
"""The label with which Taskiq's middlewares count the retries of a task; its first run has none."""
OWN_ID: Final = "taskiq-own-id"
"""The header of a recurring task whose schedule has no task id:
each run has the id of its message.
"""


class QmqBroker(AsyncBroker):
    """Tasks are messages of one subject, and all workers are one group.

    A task with the label `delay` (seconds, two years at most) is a delayed message. It is
    acknowledged when Taskiq says so (`ack_type`); a task whose worker vanished is handed out again,
    and after the group's last attempt is in the dead-letter queue `%dlq%GROUP`.
    """

    def __init__(
        self,
        addresses: str | None = None,
        *,
        subject: str = "taskiq",
        group: str = "taskiq",
        prefetch: int = 100,
        **connect: Any,
    ) -> None:
        """`prefetch` is the maximum number of tasks that a worker holds;
        `connect` are options of `qmq.connect`.
        """
        super().__init__()
        self.subject, self.group, self.prefetch = subject, group, prefetch
        self._addresses, self._connect = addresses, connect
        self._mq: qmq.Client | None = None

    @property
    def mq(self) -> qmq.Client:
        """The client. Raises ClientClosed before `startup` and after `shutdown`."""
        if self._mq is None:
            raise qmq.errors.ClientClosed("the broker is not started: await broker.startup()")
        return self._mq

    async def startup(self) -> None:
        """Make the client, for the event loop that runs; it connects when it is first used."""
        if self._mq is not None:
            await self._mq.close()
        self._mq = qmq.connect(self._addresses, **self._connect)
        await super().startup()

    async def shutdown(self) -> None:
        """Finish sending, return the tasks that have not begun, and disconnect."""
        await super().shutdown()
        if self._mq is not None:
            await self._mq.close()
            self._mq = None

    async def kick(self, message: BrokerMessage) -> None:
        """Store a task on a majority of the replicas. Raises as `Client.send`."""
        delay = message.labels.get(DELAY)
        later = (
            None if delay is None or self._is_pause(message) else timedelta(seconds=float(delay))
        )
        await self.mq.send(self.subject, message.message, key=message.task_id, delay=later)

    def _is_pause(self, message: BrokerMessage) -> bool:
        """Whether the label `delay` is that of the task's declaration, which SmartRetryMiddleware
        takes for the pause before a retry.
        """
        if RETRIES in message.labels or not any(
            isinstance(each, SmartRetryMiddleware) for each in self.middlewares
        ):
            return False
        task = self.find_task(message.task_name)
        return (
            task is not None
            and DELAY in task.labels
            and str(task.labels[DELAY]) == str(message.labels[DELAY])
        )

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Receive tasks. When the caller stops, tasks that it did not get return to the group at
        once; those that it got stay its own until each has its verdict or the broker shuts down.

        Taskiq acknowledges what it cannot run. Therefore a message that is no task goes to the
        dead-letter queue here, and a task that this worker does not know is handed out again, as
        after a failure: another worker may know it.
        """
        consumer = self.mq.consumer(
            self.subject, self.group, ack="explicit", prefetch=self.prefetch, expired="skip"
        )
        try:
            async for message in consumer:
                try:
                    name, data = task_of(
                        self.formatter,
                        message.body,
                        str(message.id) if OWN_ID in message.headers else "",
                    )
                except InvalidArgument as failure:
                    log.warning(
                        "message %s goes to the dead-letter queue: %s", message.id, failure.message
                    )
                    message.reject(failure.message)
                    continue
                if self.find_task(name) is None:
                    log.warning("this worker does not know task %r: it is handed out again", name)
                    message.nack(error=f"no worker knows task {name!r}")
                    continue
                yield AckableMessage(data=data, ack=message.ack)
        finally:
            consumer.drain()


def task_of(formatter: TaskiqFormatter, body: bytes, own_id: str = "") -> tuple[str, bytes]:
    """The name of the task in a message, and the task as Taskiq reads it, under its own id if one
    is given. Raises InvalidArgument with the formatter's reason.
    """
    try:
        task = formatter.loads(message=body)
        if own_id:
            task.task_id = own_id
            body = formatter.dumps(task).message
        task.parse_labels()
    except Exception as cause:  # any formatter, any body
        raise InvalidArgument(
            visible(f"this is no task: {type(cause).__name__}: {cause}")
        ) from None
    return task.task_name, body


class QmqScheduleSource(ScheduleSource):
    """Schedules that QMQ stores and runs. No scheduler process is needed, so `get_schedules`
    returns no schedules.
    """

    def __init__(self, broker: QmqBroker) -> None:
        self._broker = broker

    async def get_schedules(self) -> list[ScheduledTask]:
        """Always empty, because the delay servers send the tasks. `pending` lists the schedules."""
        return []

    async def pending(self) -> AsyncIterator[qmq.DelayedMessage]:
        """The pending schedules, by the time of their next run;
        the `key` of each is its schedule id.
        """
        async for each in self._broker.mq.delayed.list(self._broker.subject):
            yield each

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Send the task later, or again and again by `cron`; `cron_offset` is the name of a time
        zone, "UTC" without it.

        Raises InvalidArgument for an `interval`, and as `Client.send`.
        """
        if schedule.interval is not None:
            raise InvalidArgument(
                "QMQ schedules by time or by cron, not by interval: use schedule_by_cron"
            )
        if isinstance(schedule.cron_offset, timedelta):
            raise InvalidArgument(
                "cron_offset is the name of a time zone, such as 'Europe/Berlin', and no timedelta"
            )
        message = TaskiqMessage(
            task_id=schedule.task_id or self._broker.id_generator(),
            task_name=schedule.task_name,
            labels=schedule.labels,
            args=schedule.args,
            kwargs=schedule.kwargs,
        )
        body = self._broker.formatter.dumps(message).message
        send, subject, key = self._broker.mq.send, self._broker.subject, schedule.schedule_id
        if schedule.cron is not None:
            headers = {} if schedule.task_id else {OWN_ID: ""}
            await send(
                subject,
                body,
                key=key,
                headers=headers,
                cron=schedule.cron,
                zone=schedule.cron_offset or "UTC",
            )
        elif schedule.time is not None:
            time = (
                schedule.time
                if schedule.time.tzinfo is not None
                else schedule.time.replace(tzinfo=UTC)
            )
            await send(subject, body, key=key, at=time)

    async def delete_schedule(self, schedule_id: str) -> None:
        """Cancel a schedule. Raises MessageNotFound if no pending schedule has this id."""
        ids = [each.id async for each in self.pending() if each.key_bytes == schedule_id.encode()]
        if not ids:
            raise MessageNotFound(f"there is no pending schedule {schedule_id!r}")
        for each in ids:
            try:
                await self._broker.mq.delayed.cancel(each)
            except TooLate:
                continue
