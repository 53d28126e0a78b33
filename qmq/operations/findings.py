"""Finds the unusual states of a cluster: one function for `qmq doctor` and the console's first
screen. Pure.

servers               metaservers, coordination store, broker groups, replicas, disks, certificates
subjects and groups   backlog, pauses, dead letters, parked keys, routes
delay groups          late or impossible deliveries
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from qmq.operations.snapshot import (
    OFFLINE,
    BrokerGroupFacts,
    ClusterSnapshot,
    ConsumerGroupFacts,
    DelayGroupFacts,
    PauseFacts,
    ProcessFacts,
    ReplicaFacts,
    StorageFacts,
    StoreMemberFacts,
    SubjectFacts,
)
from qmq.operations.text import (
    THRESHOLDS,
    Finding,
    FindingKind,
    Severity,
    Thresholds,
    counted,
    in_words,
    size_in_words,
)

STATUS: Final = "qmq cluster status"
_CORRUPTING: Final = ("3.5.0", "3.5.1", "3.5.2")
"""Releases of etcd that its maintainers advise against."""

METASERVER_AWAY: Final = FindingKind(
    "metaserver-away",
    "warning; critical if none answers",
    "a metaserver of the addresses that were given does not answer",
    "Clients find brokers through metaservers, and operators administer the cluster through them. "
    "Without a metaserver no new client can connect.",
)
STORE_SILENT: Final = FindingKind(
    "store-silent",
    "warning; critical if all metaservers",
    "a metaserver has got no answer from etcd for 5 s",
    "Messages are still sent and delivered. Until etcd answers again, "
    "no failed master can be replaced, and nothing can be created or changed.",
)
STORE_MEMBER_AWAY: Final = FindingKind(
    "store-member-away",
    "warning",
    "a member of etcd does not answer a metaserver, or belongs to another etcd cluster",
    (
        "etcd answers as long as a majority of its members does. Repair the member before the "
        "next one fails."
    ),
)
STORE_VERSION: Final = FindingKind(
    "store-version",
    "warning",
    "a member of etcd is of release 3.5.0, 3.5.1 or 3.5.2",
    "etcd 3.5.0 to 3.5.2 can lose or change keys on a member that is killed, "
    "and members then differ. Upgrade etcd, one member after the other, to its newest release. To "
    "find members that differ already, start them with --experimental-initial-corrupt-check=true.",
)
NOT_ANSWERED: Final = FindingKind(
    "not-answered",
    "warning",
    "a broker group, or all servers, did not answer a request",
    "This report is incomplete. The part without an answer may hide a worse problem.",
)
NO_MASTER: Final = FindingKind(
    "no-master",
    "critical",
    "a broker group or a delay group has no master",
    (
        "Nothing can be sent to this broker group or consumed from it. Start a majority of its "
        "voters; they must reach each other and etcd."
    ),
)
REPLICA_AWAY: Final = FindingKind(
    "replica-away",
    "warning",
    "a voter or a learner does not run, or does not answer",
    "The broker group survives one failure less for each missing replica.",
)
REPLICA_BEHIND: Final = FindingKind(
    "replica-behind",
    "warning",
    "a replica lacks 10,000 entries, or its master has got no message from it for 5 s",
    (
        "It cannot become master before it has caught up. Until then the other replicas have to "
        "confirm every message."
    ),
)
REPLICA_INCOMPLETE: Final = FindingKind(
    "replica-incomplete",
    "warning",
    "a replica may lack what it acknowledged",
    (
        "It may have lost entries that it acknowledged, so it does not vote until it has caught "
        "up with a master."
    ),
)
REPLICA_FORKED: Final = FindingKind(
    "replica-forked",
    "critical",
    "a replica knows entries to be committed that its group's master does not have",
    "An older copy of a disk was put back, or a majority of the disks lost data. "
    "This replica has the missing messages: keep its folder, and follow the runbook.",
)
STORE_PUT_BACK: Final = FindingKind(
    "store-put-back",
    "critical",
    "etcd has forgotten what a replica knows it had",
    "etcd has older data than the brokers' logs. Routes, members, "
    "settings and subjects may be missing. Change nothing, and follow the runbook.",
)
MASTER_NOT_SERVING: Final = FindingKind(
    "master-not-serving",
    "warning",
    "a master does not serve clients",
    "It has won the election, and serves clients after it has committed the first entry of its "
    "epoch or, in a delay group, has fetched the schedule.",
)
MASTER_CHANGED: Final = FindingKind(
    "master-changed",
    "notice",
    "the epoch rose between two snapshots",
    (
        "If no operator moved the mastership, look for a slow disk, a bad network or an etcd "
        "that did not answer."
    ),
)
ONE_VOTER: Final = FindingKind(
    "one-voter",
    "notice",
    "a broker group has a single voter",
    (
        "Its messages are on one machine only. If the machine is lost, they are lost. This is "
        "normal for `qmq dev`."
    ),
)
DRAINED: Final = FindingKind(
    "drained",
    "notice",
    "a broker group is drained",
    "Producers use the other broker groups. Consumers read the remaining messages.",
)
INSECURE: Final = FindingKind(
    "insecure-port",
    "notice",
    "a server runs with `--insecure`",
    (
        "Everyone who can reach the port may read, change and delete everything. Restrict access "
        "by network rules, or use certificates."
    ),
)
CERTIFICATE_ENDS: Final = FindingKind(
    "certificate-ends",
    "notice, warning, critical",
    "a certificate ends in 30 days; in 7 days; it ended",
    (
        "After it has expired, no client or server can connect to this server. Replace the "
        "files; no restart is needed."
    ),
)
OBJECT_DAMAGED: Final = FindingKind(
    "object-damaged",
    "critical",
    "readers found that the object store has lost or changed bytes of the log",
    "Consumers and readers get an error where the object's messages begin. "
    "Put the object back from a copy of the bucket or its older versions. If there is none, "
    "move groups behind it: the consumers' error names the sequence for qmq group reset.",
)
UNFLUSHED: Final = FindingKind(
    "unflushed",
    "warning",
    "the oldest unflushed data is older than 10 s",
    (
        "Flushing to disk is slow or has stopped. If all replicas lose power at the same time, "
        "the unflushed data is lost."
    ),
)
DISK_FULL: Final = FindingKind(
    "disk-full",
    "warning; critical if messages are refused",
    "less than four times the reserve (`QMQ_DISK_FREE_MIB`) is free",
    (
        "A broker without free disk space refuses new messages. Consumption and acknowledgements "
        "continue."
    ),
)
VERSION_DIFFERS: Final = FindingKind(
    "version-differs",
    "notice",
    "a server's version differs from most others",
    "This is normal during an upgrade. After it, a server was not upgraded, or runs another image.",
)
CLOCKS_DIFFER: Final = FindingKind(
    "clocks-differ",
    "warning",
    "a machine's clock is 2 s from the others, or from a delay group's time",
    (
        "Due times, retention and the times in reports depend on the machines' clocks. "
        "Synchronize them by NTP."
    ),
)
RETENTION_BEHIND: Final = FindingKind(
    "retention-behind",
    "warning",
    "a replica's retention counts by a time that is an hour behind its machine's clock",
    "Messages are kept longer than retention says, until the disk is full. If the clock is "
    "right (look at it on the machine), "
    "confirm it with the variables of the replica's server; if not, repair NTP.",
)


def metaserver_findings(now: ClusterSnapshot, limits: Thresholds) -> Iterator[Finding]:
    """Findings about metaservers, their connection to the coordination store, and questions without
    an answer.
    """
    away = [each for each in now.metaservers if each.failure]
    severity = Severity.WARNING if now.is_reachable else Severity.CRITICAL
    for each in away:
        yield Finding(
            METASERVER_AWAY,
            severity,
            f"metaserver {each.address}",
            f"does not answer: {each.failure}",
            STATUS,
        )
    silent_ms = [each.store_silent_ms for each in now.metaservers if not each.failure]
    if silent_ms and max(silent_ms) > limits.store_silent_ms:
        is_all = min(silent_ms) > limits.store_silent_ms
        who = "every metaserver" if is_all else "a metaserver"
        what = f"{who} has got no answer from it for {in_words(max(silent_ms))}"
        severity = Severity.CRITICAL if is_all else Severity.WARNING
        yield Finding(
            STORE_SILENT, severity, "coordination store", what, "etcdctl endpoint health --cluster"
        )
    yield from _store_member_findings(now)
    for each_group in now.broker_groups:
        forgotten = [each for each in each_group.replicas if each.older_store]
        if forgotten:
            what = (
                f"its data was put back: {forgotten[0].older_store} (by "
                f"{', '.join(each.replica for each in forgotten)})"
            )
            yield Finding(
                STORE_PUT_BACK,
                Severity.CRITICAL,
                "coordination store",
                what,
                "qmq backup rebuild --help",
            )
    for question, reason in sorted(now.missing.items()):
        yield Finding(
            NOT_ANSWERED,
            Severity.WARNING,
            question.replace("_", " "),
            f"no answer: {reason}",
            "qmq whoami",
        )
    offline = {each.broker_group for each in now.broker_groups if each.health == OFFLINE}
    for group, reason in sorted(now.silent.items()):
        if group not in offline:
            yield Finding(
                NOT_ANSWERED,
                Severity.WARNING,
                f"broker group {group}",
                f"did not answer: {reason}",
                STATUS,
            )


def _store_member_findings(now: ClusterSnapshot) -> Iterator[Finding]:
    """Findings about single members of etcd, as the metaservers reach them."""
    told: dict[str, list[tuple[str, StoreMemberFacts]]] = {}
    for metaserver in now.metaservers:
        for each in metaserver.store_members:
            told.setdefault(each.address, []).append((metaserver.address, each))
    for address, answers in sorted(told.items()):
        about = f"etcd member {address}"
        away = [(metaserver, each.failure) for metaserver, each in answers if each.failure]
        if away:
            whom = (
                ""
                if len(away) == len(answers)
                else f" {', '.join(metaserver for metaserver, _ in away)}"
            )
            what = f"does not answer{whom}: {away[0][1]}"
            yield Finding(
                STORE_MEMBER_AWAY,
                Severity.WARNING,
                about,
                what,
                "etcdctl endpoint status --cluster -w table",
            )
        version = next((each.version for _, each in answers if each.version in _CORRUPTING), "")
        if version:
            yield Finding(
                STORE_VERSION,
                Severity.WARNING,
                about,
                f"runs etcd {version}",
                "etcdctl endpoint hashkv --cluster -w table",
            )


def broker_group_findings(
    now: ClusterSnapshot, previous: ClusterSnapshot | None, limits: Thresholds
) -> Iterator[Finding]:
    """Findings about broker groups, delay groups and their replicas."""
    before = (
        {} if previous is None else {each.broker_group: each for each in previous.broker_groups}
    )
    placed = Counter(
        name
        for each in now.subjects
        for name in (each.route.broker_groups if each.route else each.broker_groups)
    )
    for group in now.broker_groups:
        yield from _group_findings(
            group, before.get(group.broker_group), placed[group.broker_group]
        )
        for replica in group.replicas:
            yield from _replica_findings(group, replica, limits)


def _group_findings(
    group: BrokerGroupFacts, before: BrokerGroupFacts | None, subjects: int
) -> Iterator[Finding]:
    about = f"{'delay group' if group.is_delay else 'broker group'} {group.broker_group}"
    present = [each.replica for each in group.replicas if each.is_present and each.vote == "voter"]
    if _lacks_votes(group):
        doubtful = [
            each.replica for each in group.replicas if each.role is not None and not each.is_whole
        ]
        what = (
            f"elects no master: {', '.join(doubtful)} may lack entries and has no vote, so all "
            f"{len(group.voters)} voters are needed"
        )
        yield Finding(NO_MASTER, Severity.CRITICAL, about, what, f"{STATUS} --watch")
    elif group.health == OFFLINE:
        what = (
            f"has no master: {len(present)} of {len(group.voters)} voters run, and "
            f"{len(group.voters) // 2 + 1} are needed"
        )
        what += f"; subjects there: {subjects:,}" if subjects else ""
        yield Finding(NO_MASTER, Severity.CRITICAL, about, what, f"{STATUS} --watch")
    elif before is not None and before.epoch and group.epoch > before.epoch:
        what = (
            f"its master changed from {before.master or 'none'} to {group.master} a moment ago "
            f"(epoch {group.epoch})"
        )
        yield Finding(MASTER_CHANGED, Severity.NOTICE, about, what, f"{STATUS} --watch")
    if len(group.voters) == 1:
        yield Finding(ONE_VOTER, Severity.NOTICE, about, "has one voter", STATUS)
    if group.mode == "read-only":
        yield Finding(
            DRAINED,
            Severity.NOTICE,
            about,
            "is drained: it takes no new messages",
            f"qmq broker resume {group.broker_group}",
        )


def _lacks_votes(group: BrokerGroupFacts) -> bool:
    """True if no replica serves, and those that may lack entries are missing for a majority."""
    answering = [each for each in group.replicas if each.role is not None and each.vote == "voter"]
    whole = [each for each in answering if each.is_whole]
    return (
        not any(each.is_serving for each in answering)
        and len(whole) < len(group.voters) // 2 + 1
        and len(whole) < len(answering)
    )


def _replica_findings(
    group: BrokerGroupFacts, replica: ReplicaFacts, limits: Thresholds
) -> Iterator[Finding]:
    about = f"replica {replica.replica} of {group.broker_group}"
    if replica.role is None:
        if replica.vote != "none" or replica.is_present:
            yield Finding(
                REPLICA_AWAY, Severity.WARNING, about, _absence(group, replica), f"{STATUS} --watch"
            )
        return
    if replica.fork:
        yield Finding(REPLICA_FORKED, Severity.CRITICAL, about, replica.fork, STATUS)
    if not replica.is_whole:
        yield Finding(
            REPLICA_INCOMPLETE,
            Severity.WARNING,
            about,
            "may lack entries that it acknowledged",
            f"{STATUS} --watch",
        )
    if replica.replica == group.master:
        if replica.role == "master" and not replica.is_serving:
            yield Finding(
                MASTER_NOT_SERVING,
                Severity.WARNING,
                about,
                "is master, and does not serve clients yet",
                f"{STATUS} --watch",
            )
        return
    behind = replica.lag_entries or 0
    if (replica.silent_ms or 0) > limits.replica_silent_ms:
        what = f"its master has got no message from it for {in_words(replica.silent_ms or 0)}"
        yield Finding(REPLICA_BEHIND, Severity.WARNING, about, what, f"{STATUS} --watch")
    elif behind > limits.replica_lag_entries:
        what = f"lacks {behind:,} entries of its master's log"
        yield Finding(REPLICA_BEHIND, Severity.WARNING, about, what, f"{STATUS} --watch")


def _absence(group: BrokerGroupFacts, replica: ReplicaFacts) -> str:
    what = f"runs, but does not answer at {replica.control_address}"
    if not replica.is_present:
        what = "does not run, or cannot reach the coordination store"
    answering = sum(each.role is not None and each.vote == "voter" for each in group.replicas)
    if (
        group.health != OFFLINE
        and replica.vote == "voter"
        and answering <= len(group.voters) // 2 + 1
    ):
        what += f"; if one more voter fails, {group.broker_group} has no majority"
    return what


def machine_findings(now: ClusterSnapshot, limits: Thresholds) -> Iterator[Finding]:
    """Findings about disks, flushes, exposure, certificates, versions and clocks of all processes
    that answered.
    """
    replicas = [each for group in now.broker_groups for each in group.replicas]
    for each in replicas:
        if each.storage is not None:
            yield from _storage_findings(f"replica {each.replica}", each.storage, limits)
    processes = {f"metaserver {each.address}": each.process for each in now.metaservers}
    processes |= {f"replica {each.replica}": each.process for each in replicas}
    known = {about: process for about, process in processes.items() if process is not None}
    for about, process in known.items():
        yield from _process_findings(about, process, limits)
    yield from _version_findings(known)
    yield from _clock_findings(now, replicas, limits)


def _storage_findings(about: str, storage: StorageFacts, limits: Thresholds) -> Iterator[Finding]:
    free, reserved = storage.disk_free_bytes, storage.disk_reserved_bytes
    if free <= limits.disk_reserves * reserved:
        is_full = free <= reserved
        state = "refuses messages" if is_full else "is nearly full"
        what = (
            f"{state}: {size_in_words(free)} are free, and {size_in_words(reserved)} stay reserved"
        )
        severity = Severity.CRITICAL if is_full else Severity.WARNING
        yield Finding(DISK_FULL, severity, about, what, "qmq subject list")
    if storage.damaged_objects:
        names = ", ".join(storage.damaged_objects)
        what = f"the object store has lost or changed {names}"
        yield Finding(OBJECT_DAMAGED, Severity.CRITICAL, about, what, "qmq group list")
    if storage.unflushed_age_ms > limits.unflushed_age_ms:
        what = (
            f"{size_in_words(storage.unflushed_bytes)} are not flushed, the oldest for "
            f"{in_words(storage.unflushed_age_ms)}"
        )
        yield Finding(UNFLUSHED, Severity.WARNING, about, what, f"{STATUS} --watch")


def _process_findings(about: str, process: ProcessFacts, limits: Thresholds) -> Iterator[Finding]:
    if process.is_insecure:
        what = "accepts connections from other machines without certificates (--insecure)"
        yield Finding(INSECURE, Severity.NOTICE, about, what, "qmq cert cluster --help")
    left_ms = process.certificate_left_ms
    if left_ms is not None and left_ms < limits.certificate_notice_ms:
        what = (
            f"its certificate ended {in_words(-left_ms)} ago"
            if left_ms <= 0
            else f"its certificate ends in {in_words(left_ms)}"
        )
        severity = Severity.WARNING if left_ms < limits.certificate_warning_ms else Severity.NOTICE
        yield Finding(
            CERTIFICATE_ENDS,
            Severity.CRITICAL if left_ms <= 0 else severity,
            about,
            what,
            "qmq cert cluster --renew",
        )


def _version_findings(processes: dict[str, ProcessFacts]) -> Iterator[Finding]:
    """Findings about servers whose version differs from most others. A server that does not report
    its version counts as the oldest.
    """
    counts = Counter(each.version for each in processes.values())
    if len(counts) < 2:
        return
    usual, _ = max(counts.items(), key=lambda item: (item[1], item[0]))
    for about, process in processes.items():
        if process.version != usual:
            what = (
                f"runs version {process.version or 'unknown'}; most servers run "
                f"{usual or 'an older version that does not report itself'}"
            )
            yield Finding(VERSION_DIFFERS, Severity.NOTICE, about, what, f"{STATUS} --json")


def _clock_findings(
    now: ClusterSnapshot, replicas: list[ReplicaFacts], limits: Thresholds
) -> Iterator[Finding]:
    """Compares each machine's clock with the median. The clocks were read within a second, so
    smaller differences are ignored.
    """
    told = {f"replica {each.replica}": each.time_ms for each in replicas if each.time_ms}
    if len(told) > 1:
        middle = sorted(told.values())[len(told) // 2]
        for about, time_ms in told.items():
            if abs(time_ms - middle) > limits.clock_ms:
                side = "ahead of" if time_ms > middle else "behind"
                what = f"its clock is {in_words(abs(time_ms - middle))} {side} the others"
                yield Finding(
                    CLOCKS_DIFFER, Severity.WARNING, about, what, "timedatectl timesync-status"
                )
    for group in now.broker_groups:
        for each in group.replicas:
            behind_ms = each.retention_behind_ms + each.clock_step_ms
            if behind_ms > limits.retention_behind_ms:
                is_doubted = abs(each.clock_step_ms) > limits.clock_ms
                why = (
                    "the other machines do not confirm its clock"
                    if is_doubted
                    else "an operator has to confirm its clock"
                )
                what = (
                    f"its retention counts by a time {behind_ms // 1000:,} s behind its clock: "
                    f"{why}"
                )
                command = (
                    "timedatectl timesync-status"
                    if is_doubted
                    else f"qmq {'delay' if group.is_delay else 'broker'} confirm-clock"
                )
                yield Finding(
                    RETENTION_BEHIND,
                    Severity.WARNING,
                    f"replica {each.replica} of {group.broker_group}",
                    what,
                    command,
                )
    for delay in now.delay_groups:
        if abs(delay.clock_step_ms) > limits.clock_ms:
            side = "ahead of" if delay.clock_step_ms > 0 else "behind"
            what = (
                f"its master's clock is {in_words(abs(delay.clock_step_ms))} {side} the time "
                "that the group keeps"
            )
            yield Finding(
                CLOCKS_DIFFER,
                Severity.WARNING,
                f"delay group {delay.group}",
                what,
                "timedatectl timesync-status",
            )


ONE_BROKER_GROUP: Final = FindingKind(
    "one-broker-group",
    "notice",
    "there are several broker groups, and a subject is on one",
    (
        "While this broker group has no master, nothing can be sent to the subject, although "
        "other broker groups could store its messages."
    ),
)
ROUTE_CHANGE_STUCK: Final = FindingKind(
    "route-change-stuck",
    "warning",
    "a split, merge or move has been in one phase for a minute",
    "In the phase `sealed`, producers of the partitions wait until the next route is published.",
)
GROUP_LAGS: Final = FindingKind(
    "group-lags",
    "warning; notice if it catches up in time",
    "the oldest message is 5 min old, or a million messages wait",
    (
        "Its consumers are too slow, too few, or fail. Retention deletes messages that they do "
        "not reach in time."
    ),
)
NO_CONSUMERS: Final = FindingKind(
    "no-consumers",
    "warning",
    "messages have waited for a minute, and the group has no consumer",
    (
        "Retention will delete the waiting messages unread. If the group is no longer needed, "
        "delete it."
    ),
)
GROUP_PAUSED: Final = FindingKind(
    "group-paused",
    "notice",
    "a group is paused, and messages wait",
    "An operator paused it. Retention still deletes old messages.",
)
LANES_UNHELD: Final = FindingKind(
    "lanes-unheld",
    "warning",
    (
        "in two snapshots, no consumer holds a partition with waiting messages, and the group "
        "has consumers"
    ),
    (
        "The group has consumers, but none of them reads this partition: a consumer keeps its "
        "lane too long, or cannot reach the broker."
    ),
)
OVERTAKEN: Final = FindingKind(
    "retention-overtook",
    "warning",
    "retention deleted messages that the group had not received",
    "The group will never receive these messages. Retention is too short for its lag.",
)
EXPIRED: Final = FindingKind(
    "messages-expired",
    "warning",
    "between two snapshots, retention deleted messages that waited for another attempt",
    "Retention deleted failed messages before their next attempt.",
)
DYING: Final = FindingKind(
    "dying-messages",
    "warning",
    (
        "in two snapshots, the same number of messages or more waits to be copied to the "
        "dead-letter queue"
    ),
    (
        "They failed in all attempts, and cannot be copied to the dead-letter queue. A disk may "
        "be full."
    ),
)
DEAD_LETTERS: Final = FindingKind(
    "dead-letters",
    "notice; warning if one came lately",
    "the dead-letter queue has messages; one came in the last 10 min",
    (
        "They failed in all attempts, and stay in the dead-letter queue until you replay or "
        "purge them."
    ),
)
PARKED_KEYS: Final = FindingKind(
    "parked-keys",
    "warning; critical if they are too many",
    "a group has parked keys",
    (
        "A message of each key failed. It and all later messages of the key wait until you "
        "replay or skip it."
    ),
)


def subject_findings(now: ClusterSnapshot, limits: Thresholds) -> Iterator[Finding]:
    """Findings about the placement of subjects, and about route changes that are stuck."""
    groups = [each.broker_group for each in now.broker_groups if not each.is_delay]
    for each in now.subjects:
        about = f"subject {each.subject}"
        places = each.broker_groups if each.route is None else each.route.broker_groups
        if len(groups) > 1 and len(places) == 1:
            yield Finding(
                ONE_BROKER_GROUP,
                Severity.NOTICE,
                about,
                f"is on {places[0]} only",
                _spread(each, groups),
            )
        change = None if each.route is None else each.route.change
        if (
            change is not None
            and change.since_ms
            and now.time_ms - change.since_ms > limits.route_change_ms
        ):
            what = (
                f"its {change.kind} to version {change.to_version} has been {change.phase} for "
                f"{in_words(now.time_ms - change.since_ms)}"
            )
            yield Finding(
                ROUTE_CHANGE_STUCK,
                Severity.WARNING,
                about,
                what,
                f"qmq route history {each.subject}",
            )


def _spread(subject: SubjectFacts, groups: list[str]) -> str:
    if subject.route is not None:
        return f"qmq route show {subject.subject}"
    return f"qmq subject place {subject.subject} --groups {','.join(groups)}"


def group_findings(
    now: ClusterSnapshot, previous: ClusterSnapshot | None, limits: Thresholds
) -> Iterator[Finding]:
    """Findings about consumer groups: lag, and failed messages."""
    before = (
        {} if previous is None else {(each.subject, each.group): each for each in previous.groups}
    )
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
            subject = pause.subject if pause else group.subject
            resume = f"qmq resume group {subject} {group.group}".replace(" * ", " '*' ")
            yield Finding(
                GROUP_PAUSED,
                Severity.NOTICE,
                about,
                f"is paused{_pause_in_words(pause, now_ms)}; waiting: {lag}",
                resume,
            )
    elif group.lag_messages and not group.consumers:
        if group.lag_ms > limits.unconsumed_ms:
            yield Finding(
                NO_CONSUMERS,
                Severity.WARNING,
                about,
                f"has no consumers, and messages are waiting: {lag}",
                show,
            )
    else:
        if group.lag_ms > limits.lag_ms or group.lag_messages > limits.lag_messages:
            trend, left_ms = _trend(group, earlier, passed_ms)
            severity = (
                Severity.NOTICE
                if left_ms is not None and left_ms < limits.lag_ms
                else Severity.WARNING
            )
            yield Finding(GROUP_LAGS, severity, about, f"is behind: {lag}{trend}", show)
        unheld = _unheld(group) & (set() if earlier is None else _unheld(earlier))
        if unheld and group.consumers:
            numbers = ", ".join(str(number) for number in sorted(unheld)[:10])
            yield Finding(
                LANES_UNHELD,
                Severity.WARNING,
                about,
                f"no consumer reads partition {numbers}, where messages are waiting",
                show,
            )
    skipped = sum(each.skipped_messages for each in group.progress)
    if skipped:
        yield Finding(
            OVERTAKEN,
            Severity.WARNING,
            about,
            f"retention deleted {counted(skipped, 'message')} before the group received them",
            show,
        )


def _pause_in_words(pause: PauseFacts | None, now_ms: int) -> str:
    if pause is None:
        return ""
    since = f" for {in_words(max(now_ms - pause.since_ms, 0))}" if pause.since_ms else ""
    return f"{since} ({pause.reason})" if pause.reason else since


def _unheld(group: ConsumerGroupFacts) -> set[int]:
    return {each.partition for each in group.progress if each.is_unheld}


def _trend(
    group: ConsumerGroupFacts, earlier: ConsumerGroupFacts | None, passed_ms: int
) -> tuple[str, int | None]:
    """The change of the lag in words, with the time until the lag is 0 if it shrinks."""
    if earlier is None or passed_ms <= 0:
        return "", None
    change_per_s = (group.lag_messages - earlier.lag_messages) * 1000 / passed_ms
    if change_per_s >= 0:
        return (
            f"; it grows by {change_per_s:,.0f} messages/s"
            if change_per_s
            else "; it does not shrink",
            None,
        )
    left_ms = round(group.lag_messages / -change_per_s * 1000)
    return (
        f"; it shrinks by {-change_per_s:,.0f} messages/s and ends in {in_words(left_ms)}",
        left_ms,
    )


def _failure_findings(
    group: ConsumerGroupFacts, earlier: ConsumerGroupFacts | None
) -> Iterator[Finding]:
    about = _about(group)
    if group.parked_keys:
        what = (
            f"has {counted(group.parked_keys, 'parked key')} with "
            f"{counted(group.parked_messages, 'message')}"
        )
        full = [str(each.partition) for each in group.progress if each.is_full]
        if full:
            what += (
                "; that is too many: it gets no more messages of partition "
                f"{', '.join(full[:10])} until you replay or skip keys"
            )
        severity = Severity.CRITICAL if full else Severity.WARNING
        yield Finding(
            PARKED_KEYS, severity, about, what, f"qmq dlq list {group.subject} {group.group}"
        )
    if earlier is None:
        return
    if group.dying_messages and earlier.dying_messages:
        what = (
            f"{counted(group.dying_messages, 'message')} cannot be copied to its dead-letter queue"
        )
        yield Finding(DYING, Severity.WARNING, about, what, "qmq cluster status")
    expired = group.expired_messages - earlier.expired_messages
    if expired > 0:
        what = f"retention deleted {counted(expired, 'message')} before the next attempt"
        yield Finding(
            EXPIRED,
            Severity.WARNING,
            about,
            what,
            f"qmq group settings {group.subject} {group.group}",
        )


def _about(group: ConsumerGroupFacts) -> str:
    return f"group {group.group} of {group.subject}"


def dead_letter_findings(
    now: ClusterSnapshot, previous: ClusterSnapshot | None, limits: Thresholds
) -> Iterator[Finding]:
    """Findings about waiting dead letters; a warning where more came lately."""
    before = {} if previous is None else {each.group: each for each in previous.dead_letters}
    for each in now.dead_letters:
        if not each.waiting:
            continue
        earlier = before.get(each.group)
        is_new = previous is not None and each.messages > (
            earlier.messages if earlier is not None else 0
        )
        is_recent = (
            bool(each.newest_ms) and now.time_ms - each.newest_ms < limits.dead_letters_recent_ms
        )
        newest = (
            f"; the newest came {in_words(max(now.time_ms - each.newest_ms, 0))} ago"
            if each.newest_ms
            else ""
        )
        severity = Severity.WARNING if is_new or is_recent else Severity.NOTICE
        what = f"{counted(each.waiting, 'dead letter')} waiting{newest}"
        yield Finding(
            DEAD_LETTERS,
            severity,
            f"dead letters of {each.group}",
            what,
            f"qmq dlq show {each.group}",
        )


DELAY_BEHIND: Final = FindingKind(
    "delay-behind",
    "warning",
    (
        "p99 of the lateness is over 5 s, the schedule is loaded late, or due messages are not "
        "delivered"
    ),
    (
        "Delayed messages are delivered after their due time: brokers answer slowly, or more "
        "messages are due than can be delivered."
    ),
)
DELAY_TROUBLE: Final = FindingKind(
    "delay-trouble",
    "warning",
    "due messages of a subject cannot be delivered",
    (
        "The messages are due and have to wait. They are not lost, and are delivered when the "
        "cause is removed."
    ),
)
_STATS: Final = "qmq delay stats"


def delay_findings(
    now: ClusterSnapshot, previous: ClusterSnapshot | None, limits: Thresholds
) -> Iterator[Finding]:
    """Findings about the delay groups that answered."""
    before = {} if previous is None else {each.group: each for each in previous.delay_groups}
    for each in now.delay_groups:
        what = _lateness(each, before.get(each.group), limits)
        if what:
            yield Finding(DELAY_BEHIND, Severity.WARNING, f"delay group {each.group}", what, _STATS)
        for trouble in each.troubles:
            reason = (
                f"{counted(trouble.waiting, 'due message')} cannot be delivered: {trouble.reason}"
            )
            yield Finding(
                DELAY_TROUBLE,
                Severity.WARNING,
                f"delayed messages of {trouble.subject}",
                reason,
                _STATS,
            )


def _lateness(group: DelayGroupFacts, before: DelayGroupFacts | None, limits: Thresholds) -> str:
    """The lateness in words; empty if deliveries are on time."""
    if group.lateness_p99_ms > limits.lateness_ms:
        return (
            f"delivers late: one message in a hundred by {in_words(group.lateness_p99_ms)} or "
            "more in the last minute"
        )
    if 0 < group.horizon_ms < group.time_ms - limits.lateness_ms:
        return f"loads its schedule {in_words(group.time_ms - group.horizon_ms)} behind the clock"
    if (
        before is not None
        and 0 < before.waiting <= group.waiting
        and group.delivered <= before.delivered
    ):
        return f"delivers nothing, although it has {counted(group.waiting, 'due message')}"
    return ""


KINDS: Final[tuple[FindingKind, ...]] = tuple(
    [each for each in list(globals().values()) if isinstance(each, FindingKind)]
)
"""All kinds of findings."""


def findings(
    snapshot: ClusterSnapshot,
    previous: ClusterSnapshot | None = None,
    limits: Thresholds = THRESHOLDS,
) -> tuple[Finding, ...]:
    """The findings, the worst first; empty if all is well. `previous` is an earlier snapshot of the
    same cluster, at least a second old. With it, findings say what grows and what stands still;
    kinds that need two snapshots (master-changed, lanes-unheld, messages-expired, dying-messages)
    are found only with it.
    """
    if not snapshot.is_reachable:
        return tuple(metaserver_findings(snapshot, limits))
    found = [
        *metaserver_findings(snapshot, limits),
        *broker_group_findings(snapshot, previous, limits),
        *machine_findings(snapshot, limits),
        *subject_findings(snapshot, limits),
        *group_findings(snapshot, previous, limits),
        *dead_letter_findings(snapshot, previous, limits),
        *delay_findings(snapshot, previous, limits),
    ]
    return tuple(sorted(found, key=lambda each: (-each.severity, _place(each.kind), each.about)))


def _place(kind: FindingKind) -> int:
    return KINDS.index(kind)
