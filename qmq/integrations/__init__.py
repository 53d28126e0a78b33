"""Task queues and frameworks on QMQ. Each module is an optional extra over the public client;
docs/INTEGRATIONS.md is the overview.
"""
