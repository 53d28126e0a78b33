"""Ordered subjects, as clients send to them and consume them; docs/ORDERING.md is the protocol.

consuming    ordered_consumer.py is the public class; lane_core.py, key_queue.py and key_dispatcher.py are the pure cores;
             lane_reader.py talks to brokers, lane_membership.py to metaservers
producing    ordered_producer.py is the public class; stream.py and stream_partitioner.py are the pure cores;
             stream_connection.py and streams.py talk to brokers and metaservers
"""
