"""See it: a run recorded as JSON, played in the terminal and in a browser, and a doctor for the machine."""

from minispec.show.progress import enumeration, progress
from minispec.show.recorder import Recording, record
from minispec.show.replay import Replay, replay
from minispec.show.trace import SCHEMA, Trace, validate

__all__ = ["SCHEMA", "Recording", "Replay", "Trace", "enumeration", "progress", "record", "replay", "validate"]
