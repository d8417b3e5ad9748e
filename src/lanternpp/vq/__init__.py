"""Codes <-> pixels, and the neighbours of a code."""
