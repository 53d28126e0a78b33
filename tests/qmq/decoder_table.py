"""The decoders of the tree: what each reads, and what it may raise. `tests/qmq/test_decoders.py` feeds them, and says what belongs here."""

from __future__ import annotations

from typing import Final

from decoder import Decoder as Decoder
from decoders_of_commands import COMMANDS, IDENTITY, STORED
from decoders_of_libraries import CLIENT, SPARK
from decoders_of_services import CONSOLE, GATEWAY, HTTP, TASKS

DECODERS: Final = (*GATEWAY, *HTTP, *TASKS, *CONSOLE, *COMMANDS, *STORED, *CLIENT, *SPARK, *IDENTITY)

ALSO_FUZZED: Final = "tests/fuzz feeds it, behind the checksum of the log's entry"
NUMBER_ALREADY: Final = "a number already"
BY_ETCD: Final = "a value that QMQ itself keeps in etcd"
BY_SERVERS: Final = "what a server of QMQ answered"
OWN: Final = "what this program wrote itself a moment ago"

OTHERS: Final[dict[str, str]] = {
    "pyspark_qmq.datasets.deliveries.Replay._snapshot": ALSO_FUZZED,
    "qmq.columns.files.index.pasts": ALSO_FUZZED,
    "qmq.columns.files.log.FileLog._names": "names of subjects, which brokers check before they store a batch",
    "qmq.columns.files.log.FileLog.subjects": "names of subjects, which brokers check before they store a batch",
    "pyspark_qmq.java.parse_settings": "what the installed Java says of itself",
    **{
        f"pyspark_qmq.jobs.{each}": NUMBER_ALREADY
        for each in (
            *("archive._plots", "job.utc", "dead_letters.report", "delay_accuracy.binned", "duplicates._plots"),
            "order_audit._plots",
        )
    },
    "pyspark_qmq.jobs.order_audit.producer": "a column that this job wrote as hexadecimal digits",
    "pyspark_qmq.stream._sources": "the progress that Spark itself writes as JSON",
    "qmq.backup.manifest.awaits_data": BY_ETCD,
    "qmq.backup.manifest.delay_settings": BY_ETCD,
    "qmq.backup.restore.RestoreMark.decode": BY_ETCD,
    "qmq.backup.restore.known_mark": BY_ETCD,
    "qmq.backup.rebuild._group_keys": BY_ETCD,
    "qmq.backup.restore.Restore._secret": BY_ETCD,
    "qmq.cli.backup._create": BY_ETCD,
    "qmq.backup.rebuild.look_into": "the data folder of a stopped replica; tests/damage cuts and changes its files",
    "qmq.backup.restore.ReplicaTarget.made_by": "the data folder of a restore; any damage reads as no restore",
    "qmq.backup.create.ScheduleReader.read": BY_SERVERS,
    "qmq.backup.verify.BackupVerifier._verify_schedule": "tests/qmq/backup changes such states; any becomes BackupDamaged",
    "qmq.cli.confirm_clock.confirm_clock": BY_SERVERS,
    "qmq.cli.delay.histogram_view": OWN,
    "qmq.cli.delay.list_table": OWN,
    "qmq.cli.message._body_text": OWN,
    "qmq.client.consuming.settlements.pack_origin": OWN,
    "qmq.client.dead_letters.DeadLetters._done": NUMBER_ALREADY,
    "qmq.client.producing.delayed.DelayedMessage.key": "says that it raises UnicodeDecodeError; nothing of QMQ calls it",
    "qmq.client.producing.delayed.checked": NUMBER_ALREADY,
    "qmq.client.consuming.ordered.lane.unpack_keys": BY_SERVERS,
    "qmq.client.consuming.ordered.message.LaneMessage.logical_partition": NUMBER_ALREADY,
    "qmq.console.app.ConsoleSite._failure": NUMBER_ALREADY,
    "qmq.console.pages.delays.show_delays": NUMBER_ALREADY,
    "qmq.console.pages.subject.TailPace.take": NUMBER_ALREADY,
    "qmq.console.oidc.OidcFlow.came_back": "a cookie behind the console's own seal",
    "qmq.console.oidc._error_of": "the text of a refusal; any other answer reads as no text",
    "qmq.console.oidc._packed": OWN,
    "qmq.console.oidc_login.OidcLogin.begin": NUMBER_ALREADY,
    "qmq.console.drawings.lane_ranges": NUMBER_ALREADY,
    "qmq.console.drawings.partition_ranges": NUMBER_ALREADY,
    "qmq.console.drawings.ring": NUMBER_ALREADY,
    "qmq.console.translation.patterns": "a file of the package",
    "qmq.console.wording.catalog": "a file of the package",
    "qmq.gateway.sending.TopicSending._send_half": OWN,
    "qmq.integrations.kombu.envelope.due_of": "the sender's own task, before it is stored",
    "qmq.integrations.taskiq.QmqBroker.kick": "the sender's own task, before it is stored",
    "qmq.operations.finding.size_in_words": NUMBER_ALREADY,
    "qmq.operations.messages._delay_stored_ms": "a delayed id, which the client parsed before",
    "qmq.schemas.body_decoder._fingerprint": OWN,
    "qmq.security.quotas.RateMeter.__init__": NUMBER_ALREADY,
    "qmq.sql.debezium_outbox.time_ordered_id": OWN,
    "qmq.sql.dedup_records.is_there": NUMBER_ALREADY,
    "qmq.sql.connection.number": NUMBER_ALREADY,
}
"""Functions that convert what nobody else writes, or that another test feeds: the reason."""
