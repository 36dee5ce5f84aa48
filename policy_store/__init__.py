"""Driftline policy_store."""
