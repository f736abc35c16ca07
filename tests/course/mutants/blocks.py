"""Mutants."""

MUTANTS = {}
