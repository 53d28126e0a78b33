"""A simulator of delay groups: the real engine, schedule, wheel and admin in a seeded world. See run.py."""
