"""Reads the log from brokers.

log.py           the address of a cluster, sent to executors; `CommittedLog`: topology, pieces,
                 reading; committed action logs
reading.py       reads pieces from the current masters of broker groups
connection.py    one blocking connection to a broker's data port
metaservers.py   blocking calls to metaservers, with retries; an ordered subject's history as
                 partitions and their sources
"""
