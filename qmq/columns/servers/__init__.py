"""Reads the log from brokers.

server_address.py   the address of a cluster, sent to executors
log.py              `CommittedLog`: topology, pieces, reading
reading.py          reads pieces and committed action logs from the current masters of broker groups
server_routes.py    an ordered subject's history as partitions and their sources (pure)
connection.py       one blocking connection to a broker's data port
metaservers.py      blocking calls to metaservers, with retries
"""
