"""Driftline services/grader."""
