"""Driftline: asynchronous RL of hybrid mixture-of-experts language models over NATS JetStream."""

__version__ = "0.1.0"
