"""A tiny imagefolder of coloured shapes, and a tokenizer for it."""

from helpers.photos import data, model, paint, tokenizer, twin

__all__ = ["data", "model", "paint", "tokenizer", "twin"]
