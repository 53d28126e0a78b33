"""The client's own store of verdicts that no broker could be told: one file for each queue of a consumer, while its broker group is away.
What is in a file is here, and pure; `verdict_files.py` reads and writes.

    first line     the ATTACH with which its consumer comes back, and the broker group, as JSON
    each further   a verdict and when it was given, as JSON

Rules:
* Nothing is written while brokers can be reached, and a file is gone as soon as a broker has answered everything in it.
* Whoever writes a file, or hands it in, has it locked. A file that nobody has locked is of a client that died, or was closed while the
  broker was away: it may be handed in (`handing_in.py`), by one.
* A file is never rewritten in place: a new one takes its name. So what a crash leaves is the old or the new one, and perhaps a last line
  that is cut short, which counts for nothing.
* Pull sequences of a file name messages only as long as the master has handed no others out under them: when it says that it will (a part
  became void), the file is written anew before anything else is pulled.
* The store is a help, not a promise: what cannot be written waits in memory alone, with a warning. Nothing is forced to disk: a file
  outlives the process, not the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from qmq.errors import ProtocolViolation
from qmq.wire.frame_payloads import Attach
from qmq.wire.settle_payloads import BY_GROUP_MS, Settlement, Verdict

VERSION: Final = 1


class Origin(NamedTuple):
    """Whose verdicts they are: the broker group, and how the consumer comes back to it."""

    broker_group: str
    attach: Attach


class Kept(NamedTuple):
    """A verdict, and when it was given: milliseconds since 1970."""

    settlement: Settlement
    time_ms: int


def pack_origin(origin: Origin) -> bytes:
    attach = json.loads(origin.attach.pack())
    return json.dumps({"version": VERSION, "broker_group": origin.broker_group, "attach": attach}).encode() + b"\n"


def pack_verdicts(settlements: Iterable[Settlement], time_ms: int) -> bytes:
    lines = [{"time_ms": time_ms, **each._asdict(), "verdict": Verdict(each.verdict).name} for each in settlements]
    return b"".join([json.dumps(each).encode() + b"\n" for each in lines])


def unpack(data: bytes) -> tuple[Origin, list[Kept]]:
    """What a file says. Raises ValueError if it is none of ours, or damaged before its last line."""
    first, *lines = data.split(b"\n")[:-1] or [b""]  # what stands behind the last end of a line was cut short
    try:
        head = json.loads(first)
        if head["version"] != VERSION:
            raise ValueError(f"version {head['version']} of the format, which only newer clients know")
        origin = Origin(str(head["broker_group"]), Attach.unpack(json.dumps(head["attach"]).encode()))
        return origin, [_kept(json.loads(line)) for line in lines]
    except (KeyError, TypeError, RecursionError, ProtocolViolation) as cause:
        raise ValueError(f"no file of verdicts: {cause!r}") from None


def _kept(line: dict[str, Any]) -> Kept:
    numbers = [line[name] for name in ("first", "last", "delay_ms", "time_ms")]
    if not all(type(each) is int for each in numbers) or not 0 <= line["first"] <= line["last"] or not isinstance(line["error"], str):
        raise ValueError(f"{line} is no verdict")
    verdict = Settlement(line["first"], line["last"], Verdict[line["verdict"]], line["delay_ms"], line["error"])
    return Kept(verdict, line["time_ms"])


def still_to_say(kept: Iterable[Kept], next_pull: int, now_ms: int) -> list[Settlement]:
    """What a master is to be told that gives pull sequences from `next_pull` on to other messages. Delays began with their verdicts."""
    found: list[Settlement] = []
    for each, time_ms in kept:
        if each.first < next_pull:
            is_timed = each.verdict == Verdict.NACK and each.delay_ms != BY_GROUP_MS
            delay_ms = max(each.delay_ms - max(now_ms - time_ms, 0), 0) if is_timed else each.delay_ms
            found.append(each._replace(last=min(each.last, next_pull - 1), delay_ms=delay_ms))
    return found
