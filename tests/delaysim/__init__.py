"""The simulator of delay groups: the real engine, schedule, wheel and admin under one seed. See run.py."""
