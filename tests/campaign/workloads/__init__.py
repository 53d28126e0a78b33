"""Workloads: each module has a tuple WORKLOADS."""
