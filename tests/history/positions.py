"""Whether a place in a queue means one message forever, and a producer's messages lie there in its order.

A *place* is a queue and a sequence. Acknowledged sends and polls both claim "value v lies at place p", and all claims must agree:

    send ok 7 at orders/0@g1 40,  poll shows 8 at 40    inconsistent_positions: one place, two values
    send ok 7 at orders/0@g1 40,  poll shows 7 at 55    duplicate_stored: one value, two places (stored twice, not handed out twice)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from history.events import Poll, Send
from history.past import Anomaly, History

Place = tuple[str, int]
Claim = tuple[Place, int, Send | Poll]


def duplicate_stored(history: History) -> list[Anomaly]:
    """Values that were seen at two places: an idempotent producer's retry was stored again."""
    homes: dict[int, Place] = {}
    moved = {value for place, value, _ in _claims(history) if homes.setdefault(value, place) != place}
    proofs: defaultdict[int, dict[Place, Send | Poll]] = defaultdict(dict)
    for place, value, event in _claims(history) if moved else ():
        if value in moved:
            proofs[value].setdefault(place, event)
    return [Anomaly("duplicate_stored", f"{value} lies at {_places(proof)}", tuple(proof.values())) for value, proof in proofs.items()]


def inconsistent_positions(history: History) -> list[Anomaly]:
    """Places that showed two values."""
    holders: dict[Place, int] = {}
    torn = {place for place, value, _ in _claims(history) if holders.setdefault(place, value) != value}
    proofs: defaultdict[Place, dict[int, Send | Poll]] = defaultdict(dict)
    for place, value, event in _claims(history) if torn else ():
        if place in torn:
            proofs[place].setdefault(value, event)
    return [
        Anomaly("inconsistent_positions", f"{_places([place])} holds {' and '.join(map(str, proof))}", tuple(proof.values()))
        for place, proof in proofs.items()
    ]


def send_order(history: History) -> list[Anomaly]:
    """In each queue, a producer's acknowledged sends have the order of their invokes, and a batch has consecutive places."""
    return [*_rising(history), *_together(history)]


def two_masters(history: History) -> list[Anomaly]:
    """Epochs in which two replicas of a broker group acknowledged sends. The group is what follows the @ in the queue's name."""
    masters: dict[tuple[str, int], Send] = {}
    told, found = set[tuple[str, int, str]](), []
    for send, queue, _ in history.acked_sends:
        if send.epoch is None or send.replica is None:
            continue
        group = queue.rpartition("@")[2]
        first = masters.setdefault((group, send.epoch), send)
        if first.replica != send.replica and (group, send.epoch, send.replica) not in told:
            told.add((group, send.epoch, send.replica))
            what = f"epoch {send.epoch} of {group} belongs to {first.replica} and to {send.replica}"
            found.append(Anomaly("two_masters", what, (first, send)))
    return found


def _claims(history: History) -> Iterator[Claim]:
    for send, queue, base in history.acked_sends:
        for sequence, value in enumerate(send.values, base):
            yield (queue, sequence), value, send
    for poll, queue in history.polls:
        for record in poll.records:
            yield (queue, record.sequence), record.value, poll


def _places(places: dict[Place, Send | Poll] | list[Place]) -> str:
    return " and ".join(f"{queue} {sequence}" for queue, sequence in places)


def _rising(history: History) -> Iterator[Anomaly]:
    ranks = _ranks(history)
    lines: defaultdict[tuple[str, str], list[tuple[int, int, Send]]] = defaultdict(list)
    for send, queue, base in history.acked_sends:
        rank = ranks.pop(send.values[0], None) if send.values else None
        if rank is not None:
            lines[send.process, queue].append((rank, base, send))
    for (process, queue), line in lines.items():
        line.sort(key=lambda entry: entry[0])
        end, last = -1, line[0][2]
        for _, base, send in line:
            if base <= end:
                what = f"{process} sent {send.values[0]} to {queue} after {last.values[-1]}, but it lies before it: {base} <= {end}"
                yield Anomaly("send_order", what, (last, send))
            if base + len(send.values) - 1 > end:
                end, last = base + len(send.values) - 1, send


def _ranks(history: History) -> dict[int, int]:
    """Each value's number in the order of invocation.

    A value that was tried twice has none: which attempt was stored, and so where it belongs, is not known.
    """
    ranks: dict[int, int] = {}
    retried = set[int]()
    for send in history.sends:
        for value in send.values:
            if value not in ranks:
                ranks[value] = len(ranks)
            elif send.type == "invoke":
                retried.add(value)
    for value in retried:
        del ranks[value]
    return ranks


def _together(history: History) -> Iterator[Anomaly]:
    """In polls of a batch, value i is i places after value 0; this also holds if the outcome of the send is unknown."""
    homes: dict[int, Place] = {}
    for poll, queue in history.polls:
        for record in poll.records:
            homes.setdefault(record.value, (queue, record.sequence))
    torn = [(send, pair) for send in _batches(history) if (pair := _torn_pair(send, homes))]
    polls = history.first_polls({value for _, pair in torn for value in pair})
    for send, (early, late) in torn:
        what = f"{early} and {late} of one batch lie at {_places([homes[early], homes[late]])}"
        evidence = (send, polls[early]) if polls[early] is polls[late] else (send, polls[early], polls[late])
        yield Anomaly("send_order", what, evidence)


def _batches(history: History) -> Iterator[Send]:
    """Batches as they were stored: a send that was answered, else what was attempted."""
    acked = history.outcomes.acked
    told = set[int]()
    for send in history.sends:
        is_batch = send.type == "ok" or (send.type == "invoke" and acked.isdisjoint(send.values))
        if is_batch and len(send.values) > 1 and send.values[0] not in told:
            told.add(send.values[0])
            yield send


def _torn_pair(send: Send, homes: dict[int, Place]) -> tuple[int, int] | None:
    """Two values of a batch in one queue whose distance is wrong."""
    origins: dict[str, tuple[int, int]] = {}
    for index, value in enumerate(send.values):
        if value in homes:
            queue, sequence = homes[value]
            origin, early = origins.setdefault(queue, (sequence - index, value))
            if origin != sequence - index:
                return early, value
    return None
