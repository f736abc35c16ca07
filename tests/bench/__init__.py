"""Benchmarks: how fast the course's code is, as a ratio to a named peer in one run. Nothing here is a test."""
