"""The checks of the pieces. Installed as `tfmlib_checks`, so that labs have them wherever tfmlib is.

A check is a plain function `test_*` whose single argument is named after a piece. Its docstring is the promise that a
learner reads. Imports inside this package are relative, since it goes by two names.
"""
