"""Damage to files of replicas, beside a second fault: what every combination ends in (docs/reference/damage.md has the table)."""
