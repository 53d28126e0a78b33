"""The specifications of docs/specs, explored by TLC (docs/JUDGES.md)."""
