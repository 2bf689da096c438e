"""Generating and training: loops, checkpoints and models on disk."""
