"""Driftline services."""
