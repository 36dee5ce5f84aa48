"""Operators: one folder each, a readable torch reference first. Nothing here knows about models or services."""
