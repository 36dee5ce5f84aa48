"""Driftline services/rollout."""
