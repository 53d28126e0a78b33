"""The RocketMQ gateway: clients of Apache RocketMQ 5 (gRPC, `apache.rocketmq.v2`) send to and receive from QMQ. See docs/ROCKETMQ.md.

rocketmq_names       topics and groups, as subjects and groups here          pure
body_encoding        digests and compression of bodies                       pure
message_mapping      converts RocketMQ's messages and QMQ's                  pure
status_codes         QMQ's errors as RocketMQ's codes                        pure
tag_expression       which tags a subscription wants                         pure
sql_expression       SQL92 conditions over properties                        pure
message_filter       a tag expression or an SQL92 condition                  pure
invisible_messages   received messages, their times and receipt handles      pure
half_messages        how a transaction's message waits for its commit        pure
client_settings      the settings that a client gets                             pure
call_counters           which calls were made, and how they were answered  pure
client_sessions      the live clients
topic_catalog        the subjects and their kinds
group_readers        the readers of groups, for all clients of this gateway (qmq.client.group_reading)
topic_sending        SendMessage, RecallMessage
group_receiving      ReceiveMessage, AckMessage, and the other calls that settle
group_pulling        PullMessage and offsets
topic_transactions   EndTransaction, and asking producers
messaging_service    the gRPC service
gateway_metrics      metrics of calls, clients and the messages that clients hold
gateway_server       starts and stops the server
"""
