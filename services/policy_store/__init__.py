"""Driftline services/policy_store."""
