"""The gateway: other people's clients in front of an engine, over HTTP."""
