"""Damage to files of replicas, beside a second fault: what every combination ends in (docs/RELIABILITY.md has the table)."""
