"""Consumers of ordered subjects. `lane.py` and `keys.py` decide; `lane_reader.py` talks to brokers,
`membership.py` to metaservers. docs/ORDERING.md is the protocol."""
