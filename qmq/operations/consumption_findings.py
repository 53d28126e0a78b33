"""Findings about subjects and consumer groups: backlog, pauses, dead letters, parked keys, routes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.operations.cluster_snapshot import ClusterSnapshot, ConsumerGroupFacts, PauseFacts, SubjectFacts
from qmq.operations.finding import Finding, FindingKind, Severity, Thresholds, counted, in_words

ONE_BROKER_GROUP: Final = FindingKind(
    "one-broker-group",
    "While this broker group has no master, nothing can be sent to the subject, although other broker groups could store its messages.",
)
ROUTE_CHANGE_STUCK: Final = FindingKind(
    "route-change-stuck", "In the phase `sealed`, producers of the partitions wait until the next route is published."
)
GROUP_LAGS: Final = FindingKind(
    "group-lags", "Its consumers are too slow, too few, or fail. Retention deletes messages that they do not reach in time."
)
NO_CONSUMERS: Final = FindingKind(
    "no-consumers", "Retention will delete the waiting messages unread. If the group is no longer needed, delete it."
)
GROUP_PAUSED: Final = FindingKind("group-paused", "An operator paused it. Retention still deletes old messages.")
LANES_UNHELD: Final = FindingKind(
    "lanes-unheld",
    "The group has consumers, but none of them reads this partition: a consumer keeps its lane too long, or cannot reach the broker.",
)
OVERTAKEN: Final = FindingKind("retention-overtook", "The group will never receive these messages. Retention is too short for its lag.")
EXPIRED: Final = FindingKind("messages-expired", "Retention deleted failed messages before their next attempt.")
DYING: Final = FindingKind(
    "dying-messages", "They failed in all attempts, and cannot be copied to the dead-letter queue. A disk may be full."
)
DEAD_LETTERS: Final = FindingKind(
    "dead-letters", "They failed in all attempts, and stay in the dead-letter queue until you replay or purge them."
)
PARKED_KEYS: Final = FindingKind(
    "parked-keys", "A message of each key failed. It and all later messages of the key wait until you replay or skip it."
)


def subject_findings(now: ClusterSnapshot, limits: Thresholds) -> Iterator[Finding]:
    """Findings about the placement of subjects, and about route changes that are stuck."""
    groups = [each.broker_group for each in now.broker_groups if not each.is_delay]
    for each in now.subjects:
        about = f"subject {each.subject}"
        places = each.broker_groups if each.route is None else each.route.broker_groups
        if len(groups) > 1 and len(places) == 1:
            yield Finding(ONE_BROKER_GROUP, Severity.NOTICE, about, f"is on {places[0]} only", _spread(each, groups))
        change = None if each.route is None else each.route.change
        if change is not None and change.since_ms and now.time_ms - change.since_ms > limits.route_change_ms:
            what = f"its {change.kind} to version {change.to_version} has been {change.phase} for {in_words(now.time_ms - change.since_ms)}"
            yield Finding(ROUTE_CHANGE_STUCK, Severity.WARNING, about, what, f"qmq route history {each.subject}")


def _spread(subject: SubjectFacts, groups: list[str]) -> str:
    if subject.route is not None:
        return f"qmq route show {subject.subject}"
    return f"qmq subject place {subject.subject} --groups {','.join(groups)}"


def group_findings(now: ClusterSnapshot, previous: ClusterSnapshot | None, limits: Thresholds) -> Iterator[Finding]:
    """Findings about consumer groups: lag, and failed messages."""
    before = {} if previous is None else {(each.subject, each.group): each for each in previous.groups}
    passed_ms = 0 if previous is None else now.monotonic_ms - previous.monotonic_ms
    pauses = {(each.subject, each.group): each for each in now.pauses if each.kind == "group"}
    for each in now.groups:
        earlier = before.get((each.subject, each.group))
        yield from _progress_findings(each, earlier, passed_ms, limits, now.time_ms, pauses)
        yield from _failure_findings(each, earlier)


def _progress_findings(
    group: ConsumerGroupFacts,
    earlier: ConsumerGroupFacts | None,
    passed_ms: int,
    limits: Thresholds,
    now_ms: int,
    pauses: dict[tuple[str, str], PauseFacts],
) -> Iterator[Finding]:
    about, show = _about(group), f"qmq group show {group.subject} {group.group}"
    lag = f"{counted(group.lag_messages, 'message')}, the oldest {in_words(group.lag_ms)} old"
    if group.is_paused:
        if group.lag_messages:
            pause = pauses.get((group.subject, group.group)) or pauses.get(("*", group.group))
            resume = f"qmq resume group {pause.subject if pause else group.subject} {group.group}".replace(" * ", " '*' ")
            yield Finding(GROUP_PAUSED, Severity.NOTICE, about, f"is paused{_pause_in_words(pause, now_ms)}; waiting: {lag}", resume)
    elif group.lag_messages and not group.consumers:
        if group.lag_ms > limits.unconsumed_ms:
            yield Finding(NO_CONSUMERS, Severity.WARNING, about, f"has no consumers, and messages are waiting: {lag}", show)
    else:
        if group.lag_ms > limits.lag_ms or group.lag_messages > limits.lag_messages:
            trend, left_ms = _trend(group, earlier, passed_ms)
            severity = Severity.NOTICE if left_ms is not None and left_ms < limits.lag_ms else Severity.WARNING
            yield Finding(GROUP_LAGS, severity, about, f"is behind: {lag}{trend}", show)
        unheld = _unheld(group) & (set() if earlier is None else _unheld(earlier))
        if unheld and group.consumers:
            numbers = ", ".join(str(number) for number in sorted(unheld)[:10])
            yield Finding(LANES_UNHELD, Severity.WARNING, about, f"no consumer reads partition {numbers}, where messages are waiting", show)
    skipped = sum(each.skipped_messages for each in group.progress)
    if skipped:
        yield Finding(
            OVERTAKEN, Severity.WARNING, about, f"retention deleted {counted(skipped, 'message')} before the group received them", show
        )


def _pause_in_words(pause: PauseFacts | None, now_ms: int) -> str:
    if pause is None:
        return ""
    since = f" for {in_words(max(now_ms - pause.since_ms, 0))}" if pause.since_ms else ""
    return f"{since} ({pause.reason})" if pause.reason else since


def _unheld(group: ConsumerGroupFacts) -> set[int]:
    return {each.partition for each in group.progress if each.is_unheld}


def _trend(group: ConsumerGroupFacts, earlier: ConsumerGroupFacts | None, passed_ms: int) -> tuple[str, int | None]:
    """The change of the lag in words, with the time until the lag is 0 if it shrinks."""
    if earlier is None or passed_ms <= 0:
        return "", None
    change_per_s = (group.lag_messages - earlier.lag_messages) * 1000 / passed_ms
    if change_per_s >= 0:
        return f"; it grows by {change_per_s:,.0f} messages/s" if change_per_s else "; it does not shrink", None
    left_ms = round(group.lag_messages / -change_per_s * 1000)
    return f"; it shrinks by {-change_per_s:,.0f} messages/s and ends in {in_words(left_ms)}", left_ms


def _failure_findings(group: ConsumerGroupFacts, earlier: ConsumerGroupFacts | None) -> Iterator[Finding]:
    about = _about(group)
    if group.parked_keys:
        what = f"has {counted(group.parked_keys, 'parked key')} with {counted(group.parked_messages, 'message')}"
        full = [str(each.partition) for each in group.progress if each.is_full]
        if full:
            what += f"; that is too many: it gets no more messages of partition {', '.join(full[:10])} until you replay or skip keys"
        severity = Severity.CRITICAL if full else Severity.WARNING
        yield Finding(PARKED_KEYS, severity, about, what, f"qmq dlq list {group.subject} {group.group}")
    if earlier is None:
        return
    if group.dying_messages and earlier.dying_messages:
        what = f"{counted(group.dying_messages, 'message')} cannot be copied to its dead-letter queue"
        yield Finding(DYING, Severity.WARNING, about, what, "qmq cluster status")
    expired = group.expired_messages - earlier.expired_messages
    if expired > 0:
        what = f"retention deleted {counted(expired, 'message')} before the next attempt"
        yield Finding(EXPIRED, Severity.WARNING, about, what, f"qmq group settings {group.subject} {group.group}")


def _about(group: ConsumerGroupFacts) -> str:
    return f"group {group.group} of {group.subject}"


def dead_letter_findings(now: ClusterSnapshot, previous: ClusterSnapshot | None, limits: Thresholds) -> Iterator[Finding]:
    """Findings about waiting dead letters; a warning where more came lately."""
    before = {} if previous is None else {each.group: each for each in previous.dead_letters}
    for each in now.dead_letters:
        if not each.waiting:
            continue
        earlier = before.get(each.group)
        is_new = previous is not None and each.messages > (earlier.messages if earlier is not None else 0)
        is_recent = bool(each.newest_ms) and now.time_ms - each.newest_ms < limits.dead_letters_recent_ms
        newest = f"; the newest came {in_words(max(now.time_ms - each.newest_ms, 0))} ago" if each.newest_ms else ""
        severity = Severity.WARNING if is_new or is_recent else Severity.NOTICE
        what = f"{counted(each.waiting, 'dead letter')} waiting{newest}"
        yield Finding(DEAD_LETTERS, severity, f"dead letters of {each.group}", what, f"qmq dlq show {each.group}")
