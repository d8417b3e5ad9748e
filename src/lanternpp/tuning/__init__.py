"""Tuning: which static tree draws fastest on this machine, from what was measured on it."""
