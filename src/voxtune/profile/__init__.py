"""Capture of whole steps into a Session, and the classes of kernels."""
