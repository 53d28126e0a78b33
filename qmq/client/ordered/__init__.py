"""Ordered subjects, as clients send to them and consume them; docs/ORDERING.md is the protocol.

Consuming: `consumer` is the door; `lane_core`, `keys` and `desk` decide, `lane` and `membership` talk to brokers and metaservers.

Producing to them: `producer` is the door; `stream` and `stream_partitioner` decide, `stream_connection` and `streams` talk to
brokers and metaservers.
"""
