"""Runs as files: recorded from the broker, and made again from what was recorded."""
