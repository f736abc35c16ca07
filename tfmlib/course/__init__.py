"""The course's machinery: checks for learners, kept pieces, notebooks, grading. tfmlib itself never imports it.

A lab needs two names of it: `from tfmlib.course.workshop import begin` and `from tfmlib.course.check import check`.
"""
