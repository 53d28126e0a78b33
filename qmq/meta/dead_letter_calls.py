"""Describes dead-letter queues over all broker groups: a dead letter is stored where its message died."""

from __future__ import annotations

from collections.abc import Sequence

from qmq.errors import UnknownGroup
from qmq.meta.broker_calls import Brokers
from qmq.model import OPERATORS, check_name, dead_letter_subject, is_dead_letters
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


async def describe_dead_letters(brokers: Brokers, hosts: Sequence[str], group: str) -> pb.DescribeDeadLettersResponse:
    """The dead-letter queues of one group, or of all if it is empty, ordered by group. Raises InvalidName; NotConnected if no broker group
    answers.
    """
    subject = dead_letter_subject(check_name("group", group)) if group else ""
    queues = await brokers.ask_masters(hosts, "DescribeQueues", control.DescribeQueuesRequest(subject=subject))
    asked = control.DescribeGroupsRequest(subject=subject, group=OPERATORS)
    groups = await brokers.ask_masters(hosts, "DescribeGroups", asked, absent=(UnknownGroup,))
    looked = {(each.subject, each.broker_group): each for answer in groups.found.values() for each in answer.groups}
    found = [
        _described(queue, looked.get((queue.subject, queue.broker_group)))
        for answer in queues.partial()
        for queue in answer.queues
        if queue.broker_group not in groups.missing
        and is_dead_letters(queue.subject)
        and queue.next_sequence
        and (queue.next_sequence > queue.start_sequence or (queue.subject, queue.broker_group) in looked)
    ]
    found.sort(key=lambda each: (each.group, each.broker_group))
    return pb.DescribeDeadLettersResponse(queues=found, silent=queues.silent | groups.silent)


def _described(queue: control.Queue, looked: control.Group | None) -> pb.DeadLetterQueue:
    """Build the description of one queue. Dead letters that no operator has handled count as pending."""
    kept = queue.next_sequence - queue.start_sequence
    waiting = kept if looked is None else min(looked.waiting + looked.unacked + looked.requeued, kept)
    return pb.DeadLetterQueue(
        group=queue.subject.removeprefix(dead_letter_subject("")),
        broker_group=queue.broker_group,
        messages=kept,
        waiting=waiting,
        newest_ms=queue.last_append_ms,
        oldest_ago_ms=looked.lag_ms if looked is not None else queue.oldest_age_ms,
    )
