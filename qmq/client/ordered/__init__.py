"""Ordered subjects, as clients send to them and consume them; docs/ORDERING.md is the protocol.

consuming    ordered_consumer.py is what applications call; lane_core.py, key_queue.py and key_dispatcher.py decide;
             lane_reader.py talks to brokers, lane_membership.py to metaservers
producing    ordered_producer.py is what applications call; stream.py and stream_partitioner.py decide;
             stream_connection.py and streams.py talk to brokers and metaservers
"""
