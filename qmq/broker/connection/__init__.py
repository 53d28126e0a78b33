"""The data port: connections, their frames and their rights."""
