"""Tokenizers of published models, and the chat templates that go with them."""
