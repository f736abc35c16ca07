"""The reference, broken on purpose in small ways that nobody's misconception describes.

One file for each topic. `MUTANTS` maps a piece to pairs (text in the reference's source, what to put in its place).
"""
