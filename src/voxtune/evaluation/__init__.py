"""Evaluating volumes, searching steps, usefulness and the demonstration."""
