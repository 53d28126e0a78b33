"""The log as brokers serve it.

address.py   where a cluster is; what travels to executors
log.py       `CommittedLog`: topology, pieces, reading
reading.py   a piece, request by request, over all the masters that its broker group has meanwhile
routes.py    an ordered subject's history as partitions and their sources (pure)
masters.py   which address serves a broker group now
channel.py   one blocking connection to a broker's data port
metadata.py  metaservers, asked and waited for
actions.py   the committed action log of a broker group
"""
