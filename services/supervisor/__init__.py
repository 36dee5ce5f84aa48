"""`driftline run`: the broker and every service as processes of one machine, kept alive and ended in order."""
