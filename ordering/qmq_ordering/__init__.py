"""Ordered subjects, pure: the hash, routes and their changes, which group reads what, who reads which lane, when to reshard.

Nothing here does I/O, knows a clock or draws a random number. Clients, brokers and metaservers all decide by these functions;
docs/ORDERING.md is the protocol that they make up together.
"""
