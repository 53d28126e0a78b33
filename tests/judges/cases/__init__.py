"""Modules that a runner copies into a suite of another project."""
