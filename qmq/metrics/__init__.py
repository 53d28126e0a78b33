"""Metrics for Prometheus: definitions, reading and serving them, independent of roles. See docs/METRICS.md.

    figures      figures and their sources: pure, and all that counting code imports
    exposition   figures as text, little by little, so that nobody waits for a large page
    endpoint     GET /metrics

The code that reads a role's state is with the role: `qmq/client/metrics.py`, `qmq/node/metering/`.
"""
