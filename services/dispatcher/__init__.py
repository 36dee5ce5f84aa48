"""Driftline services/dispatcher."""
