"""The course's machinery: checks for learners, kept pieces, notebooks, grading. tfmlib itself never imports it."""

from tfmlib.course.check import check
from tfmlib.course.workshop import begin

__all__ = ["begin", "check"]
