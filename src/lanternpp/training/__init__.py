"""Trainings of drafters."""
