"""Metrics, and the verdict "same as the reference?"."""
