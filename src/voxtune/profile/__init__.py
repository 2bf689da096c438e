"""Recording of whole steps as sessions."""

from voxtune.profile.capture import capture, profile_step
from voxtune.profile.session import Session, find_sessions, load_session

__all__ = ["Session", "capture", "find_sessions", "load_session", "profile_step"]
