"""Connections to brokers: one socket, and the pool of a client."""
