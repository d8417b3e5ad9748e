"""A tiny imagefolder of coloured shapes, and a tokenizer for it."""

from helpers.photos import data, model, paint, ready, tokenizer, twin

__all__ = ["data", "model", "paint", "ready", "tokenizer", "twin"]
