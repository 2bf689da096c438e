"""The segmenter and its training."""
