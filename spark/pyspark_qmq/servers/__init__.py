"""The log as brokers serve it.

server_address.py   where a cluster is; what travels to executors
server_log.py       `CommittedLog`: topology, pieces, reading
server_reader.py   a piece, request by request, over all the masters that its broker group has meanwhile
server_routes.py    an ordered subject's history as partitions and their sources (pure)
masters.py   which address serves a broker group now
blocking_connection.py   one blocking connection to a broker's data port
metaservers.py  metaservers, asked and waited for
server_actions.py   the committed action log of a broker group
"""
