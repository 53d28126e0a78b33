"""The RocketMQ gateway: clients of Apache RocketMQ 5 (gRPC, `apache.rocketmq.v2`) send to and receive from QMQ. See docs/ROCKETMQ.md.

rocketmq_names      topics and groups, as subjects and groups here        pure
body_encoding       digests and compression of bodies                     pure
message_mapping     their messages and ours                               pure
status_codes        our errors as their codes                             pure
tag_expression      which tags a subscription wants                       pure
invisible_messages  what was handed out, until when, under which handle   pure
client_settings     what a client is told to do                           pure
client_sessions     which clients there are
group_reader        one group's reading of one subject
group_readers       all of them
messaging_calls     what each call does
messaging_service   the calls as gRPC has them
gateway_server      the process's part: listen, stop
"""
