"""For the tutorials: self-grading exercises, and what their cells need besides the package itself."""

from minispec.teach.grading import Outcome, check, grade
from minispec.teach.helpers import Dice, compare, device, laws, prompts, source, style

__all__ = ["Dice", "Outcome", "check", "compare", "device", "grade", "laws", "prompts", "source", "style"]
