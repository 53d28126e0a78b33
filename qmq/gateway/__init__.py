"""The RocketMQ gateway: clients of Apache RocketMQ 5 (gRPC, `apache.rocketmq.v2`) send to and receive from QMQ. See docs/ROCKETMQ.md.

rocketmq_names       topics and groups, as subjects and groups here          pure
body_encoding        digests and compression of bodies                       pure
message_mapping      their messages and ours                                 pure
status_codes         our errors as their codes                               pure
tag_expression       which tags a subscription wants                         pure
sql_expression       SQL92 conditions over properties                        pure
message_filter       either of them                                          pure
invisible_messages   what was handed out, until when, under which handle     pure
half_messages        how a transaction's message waits for its commit        pure
client_settings      the settings that a client gets                             pure
call_counters           which calls were made, and how they were answered  pure
client_sessions      which clients there are
topic_catalog        which subjects there are, and of what kind
group_readers        the readings of groups, for all clients here (qmq.client.group_reading)
topic_sending        SendMessage, RecallMessage
group_receiving      ReceiveMessage, AckMessage, and what else settles
group_pulling        PullMessage and offsets
topic_transactions   EndTransaction, and asking producers
messaging_service    the calls as gRPC has them
gateway_metrics      figures of calls, clients and messages in their hands
gateway_server       the process's part: listen, stop
"""
