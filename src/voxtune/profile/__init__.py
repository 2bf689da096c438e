"""Capture of whole steps into a Session, and the classes of kernels."""

from voxtune.profile.capture import capture, profile_step
from voxtune.profile.session import Session, find_sessions, load_session

__all__ = ["Session", "capture", "find_sessions", "load_session", "profile_step"]
