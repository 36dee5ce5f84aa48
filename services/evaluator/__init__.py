"""Driftline services/evaluator."""
