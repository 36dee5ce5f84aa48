"""The audit: every id accounted for, recomputed from the broker alone."""
