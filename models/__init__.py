"""Driftline models."""
