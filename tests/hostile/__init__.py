"""Damaged files and interrupted commands in large numbers (make test-hostile)."""
