"""Checkpoints of other programs: reading them, and writing what they read."""
