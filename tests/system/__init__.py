"""Whole processes: kills, faults, files, the command line."""
