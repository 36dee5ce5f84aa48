"""Driftline messages."""
