"""Tests of whole processes: kills, faults, files, the command line."""
