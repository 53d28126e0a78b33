"""Checkers: each module has a tuple CHECKERS. Pure functions of histories that know the contract
(docs/CONTRACT.md) and import no module of the product; a test refuses one that does.

What workloads write down beyond tests/history has its kinds of events here, beside the checkers.
"""
