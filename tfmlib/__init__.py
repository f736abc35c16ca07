"""A small transformer library, made of pieces that a learner rebuilds one at a time.

Plain PyTorch in modules that follow the chapters of the course. Letters, the same everywhere:
B batch, T query tokens, S key tokens, C model width, H query heads, K key/value heads, D head width.
"""

__version__ = "0.4.0"
