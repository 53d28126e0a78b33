"""A simulator of delay groups: the real engine, schedule, wheel and desk in a seeded world. See run.py."""
