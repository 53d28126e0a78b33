"""Ordered subjects, pure: the hash, routes and their changes, versions that groups read, lanes of
consumers, automatic resharding.

These modules do no I/O, know no clock and draw no random numbers. Clients, brokers and metaservers
all decide by these functions. docs/ORDERING.md describes the protocol.
"""
