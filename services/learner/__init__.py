"""Driftline services/learner."""
