"""A tiny imagefolder of coloured shapes, a tokenizer for it, and the scripts that train on them."""

from helpers.photos import command, data, model, paint, ready, tokenizer, twin

__all__ = ["command", "data", "model", "paint", "ready", "tokenizer", "twin"]
