"""Driftline environments."""
