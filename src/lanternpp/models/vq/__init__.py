"""Image tokenizers: codes to pixels and back, and the nearest neighbours of a code."""
