"""A tiny imagefolder of coloured shapes, and a tokenizer for it."""

from helpers.photos import data, model, ready, tokenizer

__all__ = ["data", "model", "ready", "tokenizer"]
