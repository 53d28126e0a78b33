"""Reads the log from brokers.

server_address.py   the address of a cluster, sent to executors
log.py       `CommittedLog`: topology, pieces, reading
reading.py   reads a piece request by request, and follows changes of the master
server_routes.py    an ordered subject's history as partitions and their sources (pure)
reading.py   the current master of a broker group, and connections to it
connection.py   one blocking connection to a broker's data port
metaservers.py  blocking calls to metaservers, with retries
reading.py   the committed action log of a broker group
"""
