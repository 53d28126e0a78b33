"""The delay server: delayed messages wait on disk, in files for each hour, and are sent when they
are due. docs/DELAY.md.
"""
