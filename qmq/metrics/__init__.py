"""Metrics for Prometheus: definitions, reading and serving them, independent of roles. See
docs/METRICS.md.

    figures    figures and their sources: pure, and all that counting code imports
    endpoint   GET /metrics: figures as text, in pieces, so that a large page does not block the
               event loop

The code that reads a role's state is with the role: `qmq/client/metrics.py`, `qmq/node/metrics/`.
"""
