"""Driftline kernels."""
