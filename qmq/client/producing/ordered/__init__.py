"""Producers of ordered subjects: a stream for each partition keeps the order while routes change.
docs/ORDERING.md is the protocol.
"""
