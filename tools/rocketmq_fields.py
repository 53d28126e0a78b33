"""What the gateway does with each field of RocketMQ's API; tools/reference.py makes
docs/reference/rocketmq_fields.md of it.
"""

from typing import Final

FIELDS: Final = (
    (
        "Resource",
        "resource_namespace name",
        "the subject or group `NAMESPACE.NAME`; without a namespace, `NAME`",
    ),
    ("FilterExpression", "type expression", "tags, or a condition over headers"),
    ("Message", "topic", "the subject"),
    (
        "Message",
        "user_properties",
        "headers of the same names, which must not begin with `rocketmq-` or `qmq-`",
    ),
    ("Message", "system_properties body", "below; the body, uncompressed"),
    ("SystemProperties", "tag", "the tag; the first one of a message with several"),
    (
        "SystemProperties",
        "keys",
        "header `rocketmq-keys`; the first is the key on an unordered subject",
    ),
    (
        "SystemProperties",
        "message_id",
        "header `rocketmq-id`; QMQ's own id for a message that has none",
    ),
    ("SystemProperties", "body_digest", "checked when sent; MD5 of the body when received"),
    ("SystemProperties", "body_encoding", "GZIP is decompressed when sent; IDENTITY when received"),
    (
        "SystemProperties",
        "message_type",
        "header `rocketmq-type`; one that is left out follows from the other fields",
    ),
    ("SystemProperties", "born_timestamp", "ignored when sent; the create time when received"),
    ("SystemProperties", "born_host", "header `rocketmq-born-host`"),
    ("SystemProperties", "store_timestamp", "when the broker stored the message"),
    (
        "SystemProperties",
        "store_host",
        "ignored when sent; empty when received: clients know no brokers",
    ),
    ("SystemProperties", "delivery_timestamp", "the due time; header `rocketmq-due-ms`"),
    ("SystemProperties", "receipt_handle", "names the message in the gateway's hands"),
    ("SystemProperties", "queue_id queue_offset", "the queue that was asked; the sequence"),
    ("SystemProperties", "invisible_duration", "the invisible time that the message got"),
    ("SystemProperties", "delivery_attempt", "the attempt, from 1"),
    ("SystemProperties", "message_group", "the key of an ordered subject"),
    ("SystemProperties", "trace_context", "header `traceparent`"),
    (
        "SystemProperties",
        "orphaned_transaction_recovery_duration",
        (
            "the age at which the transaction is asked about first; without it, or 0: 6 s; 12 h "
            "and more are refused"
        ),
    ),
    (
        "SystemProperties",
        "dead_letter_queue",
        "not set: `qmq dlq` shows where a dead letter came from",
    ),
    (
        "SystemProperties",
        "lite_topic priority",
        "belong to types that are refused: `UNSUPPORTED`; ignored with other types",
    ),
    ("DeadLetterQueue", "topic message_id", "not set"),
    ("Digest", "type checksum", "CRC32, MD5 and SHA1 are checked"),
    ("Address", "host port", "an address of the gateway"),
    ("Endpoints", "scheme addresses", "those by which the client came, or `--advertise`"),
    ("Broker", "name id endpoints", "the broker group, `qmq` for an ordered topic; 0; the gateway"),
    (
        "MessageQueue",
        "topic id permission broker",
        (
            "a broker group of the topic; READ_WRITE; which one a client names matters to pull "
            "consumers only"
        ),
    ),
    (
        "MessageQueue",
        "accept_message_types",
        "unordered: NORMAL, DELAY, TRANSACTION; ordered: these and FIFO",
    ),
    ("Assignment", "message_queue", "all queues, for every consumer"),
    (
        "Status",
        "code message",
        "the outcome of a call, or of an entry; the message says what to do",
    ),
    (
        "RetryPolicy",
        "max_attempts exponential_backoff customized_backoff",
        "`attempts_max` and `retry_delays_ms` of the group; for producers three attempts",
    ),
    ("ExponentialBackoff", "initial max multiplier", "10 ms to 1 s, doubled, told to producers"),
    ("CustomizedBackoff", "next", "`retry_delays_ms` of the group"),
    (
        "Settings",
        "client_type",
        (
            "PRODUCER, PUSH_CONSUMER, SIMPLE_CONSUMER, PULL_CONSUMER; others and a missing one "
            "are refused: `UNRECOGNIZED_CLIENT_TYPE`"
        ),
    ),
    ("Settings", "access_point request_timeout user_agent", "answered as the client told them"),
    ("Settings", "backoff_policy", "filled in by the gateway"),
    ("Settings", "publishing subscription", "below"),
    ("Settings", "metric", "off: the gateway has its own metrics"),
    (
        "UA",
        "language version platform hostname",
        "ignored: calls are counted by the language of their header",
    ),
    ("Metric", "on endpoints", "off"),
    ("Publishing", "topics", "producers of these topics are asked about their transactions"),
    ("Publishing", "max_body_size validate_message_type", "4 MiB; true"),
    (
        "SubscriptionEntry",
        "topic expression",
        "which topics are FIFO; filters count when a call has them",
    ),
    ("Subscription", "group subscriptions", "the group and subscriptions of the settings"),
    ("Subscription", "fifo", "true if one of the topics is ordered"),
    (
        "Subscription",
        "receive_batch_size long_polling_timeout",
        "32; 20 s unless the client says otherwise",
    ),
    ("Subscription", "lite_subscription_quota max_lite_topic_size", "not set"),
    ("OffsetOption", "policy offset tail_n timestamp", "of lite topics: not served"),
    ("QueryRouteRequest", "topic endpoints", "the subject; the way by which the client came"),
    (
        "QueryRouteResponse",
        "status message_queues",
        "one queue for each broker group; one for all of an ordered topic",
    ),
    (
        "QueryAssignmentRequest",
        "topic group endpoints",
        "as those of QueryRoute; the group's name is checked",
    ),
    ("QueryAssignmentResponse", "status assignments", "all queues"),
    ("SendMessageRequest", "messages", "each is sent, and has its own result"),
    ("SendMessageResponse", "status entries", "in the order of the messages"),
    ("SendResultEntry", "status message_id offset", "the client's own id; the sequence"),
    (
        "SendResultEntry",
        "transaction_id recall_handle",
        "the delayed id of a half message; that of a delayed message, with its id",
    ),
    (
        "ReceiveMessageRequest",
        "group message_queue filter_expression batch_size",
        "the group's next messages; the queue names the topic",
    ),
    (
        "ReceiveMessageRequest",
        "invisible_duration auto_renew",
        "10 s to 12 h; or as long as the client lives, three hours at most",
    ),
    ("ReceiveMessageRequest", "long_polling_timeout", "how long an empty call waits"),
    (
        "ReceiveMessageRequest",
        "attempt_id",
        "ignored: a call that broke off gives back what its client did not get",
    ),
    (
        "ReceiveMessageResponse",
        "status message delivery_timestamp",
        "first the status, then the messages, then the gateway's time",
    ),
    ("AckMessageRequest", "group topic entries", "must be those of the messages"),
    (
        "AckMessageEntry",
        "message_id receipt_handle lite_topic",
        "the handle decides; the id is handed back; ignored",
    ),
    ("AckMessageResponse", "status entries", "in the order of the request"),
    ("AckMessageResultEntry", "message_id receipt_handle status", "as the client named them"),
    (
        "ForwardMessageToDeadLetterQueueRequest",
        "group topic receipt_handle message_id",
        "the handle decides",
    ),
    (
        "ForwardMessageToDeadLetterQueueRequest",
        "delivery_attempt max_delivery_attempts",
        "in the dead letter's reason",
    ),
    ("ForwardMessageToDeadLetterQueueRequest", "lite_topic", "ignored"),
    ("ForwardMessageToDeadLetterQueueResponse", "status", ""),
    (
        "HeartbeatRequest",
        "group client_type",
        "the client is alive; one type that is not served is refused",
    ),
    ("HeartbeatResponse", "status", ""),
    (
        "EndTransactionRequest",
        "topic transaction_id resolution",
        "commits or cancels the half message; the topic must be its own",
    ),
    ("EndTransactionRequest", "message_id source trace_context", "ignored"),
    ("EndTransactionResponse", "status", ""),
    (
        "ChangeInvisibleDurationRequest",
        "group topic receipt_handle invisible_duration message_id",
        "a new time from now on; the handle decides",
    ),
    ("ChangeInvisibleDurationRequest", "suspend", "no attempt is counted (unordered)"),
    ("ChangeInvisibleDurationRequest", "lite_topic", "ignored"),
    (
        "ChangeInvisibleDurationResponse",
        "status receipt_handle",
        "the new handle; the old one is void",
    ),
    ("RecallMessageRequest", "topic recall_handle", "cancels the delayed message"),
    ("RecallMessageResponse", "status message_id", "the client's own id"),
    ("NotifyClientTerminationRequest", "group", "what the client holds of it comes again at once"),
    ("NotifyClientTerminationResponse", "status", ""),
    (
        "PullMessageRequest",
        "group message_queue offset batch_size filter_expression long_polling_timeout",
        "reads a broker group from a sequence",
    ),
    (
        "PullMessageResponse",
        "status message next_offset",
        "first the status, then the messages, then where to continue",
    ),
    (
        "UpdateOffsetRequest",
        "group message_queue offset",
        "moves the group's progress, as `qmq group reset` does, with the same permission",
    ),
    ("UpdateOffsetResponse", "status", ""),
    ("GetOffsetRequest", "group message_queue", ""),
    ("GetOffsetResponse", "status offset", "everything before it is done"),
    (
        "QueryOffsetRequest",
        "message_queue query_offset_policy timestamp",
        "the sequence of the beginning, the end, or a time",
    ),
    ("QueryOffsetResponse", "status offset", ""),
    ("TelemetryCommand", "status settings", "settings are answered with settings"),
    (
        "TelemetryCommand",
        "recover_orphaned_transaction_command",
        "sent to a producer whose transaction has no decision",
    ),
    (
        "TelemetryCommand",
        "thread_stack_trace verify_message_result",
        "ignored: the gateway does not ask for them",
    ),
    (
        "TelemetryCommand",
        (
            "print_thread_stack_trace_command verify_message_command reconnect_endpoints_command "
            "notify_unsubscribe_lite_command"
        ),
        "never sent",
    ),
    (
        "RecoverOrphanedTransactionCommand",
        "message transaction_id",
        "the half message, with its body",
    ),
    ("PrintThreadStackTraceCommand", "nonce", "never sent"),
    ("ReconnectEndpointsCommand", "nonce", "never sent"),
    ("ThreadStackTrace", "nonce thread_stack_trace", "ignored"),
    ("VerifyMessageCommand", "nonce message", "never sent"),
    ("VerifyMessageResult", "nonce", "ignored"),
    ("NotifyUnsubscribeLiteCommand", "lite_topic", "never sent"),
    (
        "SyncLiteSubscriptionRequest",
        "action topic group lite_topic_set version offset_option",
        "answered `UNSUPPORTED`",
    ),
    ("SyncLiteSubscriptionResponse", "status", "`UNSUPPORTED`"),
)
"""A message, some of its fields, and what they are in QMQ."""
