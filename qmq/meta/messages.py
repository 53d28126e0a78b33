"""Finds the places of one message on all groups that may have it, and gets its trail from the group that has it."""

from __future__ import annotations

from collections.abc import Iterable

from qmq.errors import MessageNotFound, QmqError, UnknownSubject
from qmq.meta.calls import Brokers
from qmq.model import MessageId, check_name
from qmq.process.event_loop import time_of
from qmq.proto.v1 import control_pb2 as control


async def find_every(brokers: Brokers, hosts: Iterable[str], request: control.FindMessageRequest) -> control.FindMessageResponse:
    """Find every place where a message is stored, the earliest first. The answer is incomplete if a group does not answer, or if only delay
    groups have the message and not everything could be searched. Raises NotConnected if no place is found and a group did not answer;
    MessageNotFound.
    """
    absent: tuple[type[QmqError], ...] = (MessageNotFound, UnknownSubject)
    answers = await brokers.ask_masters(hosts, "FindMessage", request, absent=absent)
    found = answers.found.values()
    places = [place for answer in found if answer.HasField("message") for place in (answer.message, *answer.others)]
    is_cut = any(answer.is_incomplete for answer in found)
    if not places:
        answers.require_all(f"not on {', '.join(answers.absent)}" if answers.absent else "")
        raise _not_found(request, is_cut=is_cut)
    places.sort(key=lambda place: (place.append_time_ms, place.broker_group, place.subject, place.sequence))
    is_incomplete = bool(answers.missing) or (is_cut and all(place.due_ms for place in places))
    return control.FindMessageResponse(message=places[0], others=places[1:], is_incomplete=is_incomplete)


def _not_found(request: control.FindMessageRequest, *, is_cut: bool) -> MessageNotFound:
    born = time_of(MessageId.parse(request.message_id).producer_id >> 20)
    more = "Not everything was looked through: name its subject, or give its delayed id" if is_cut else "Retention may have taken it"
    return MessageNotFound(
        f"no kept message of {request.subject or 'any subject'} has the id {request.message_id}, whose producer began at "
        f"{born:%Y-%m-%d %H:%M:%S} UTC. {more}"
    )


async def trace_message(brokers: Brokers, request: control.TraceMessageRequest) -> control.TraceMessageResponse:
    """Ask the master of the group that has the message. Raises the master's error, NotConnected."""
    found: control.TraceMessageResponse = await brokers.ask_master(
        check_name("broker group", request.broker_group), "TraceMessage", request
    )
    return found
