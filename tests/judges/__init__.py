"""Suites of other projects, run against QMQ: `scripts/judges NAME [CHECKOUT]`.

A suite comes from PyPI, or from a checkout of its project. `runner` copies it, starts a node, a
gateway and Redis as it needs, runs it, and compares the outcomes with `differences.json`: the tests
that fail, with reasons. A failure that is not in this list fails the command. Each module `*_suite`
says how one suite is run, and what is changed in it; `page` writes the counts into
docs/JUDGES.md.
"""
