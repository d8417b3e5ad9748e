"""The decoder network, and reading, writing and storing weights."""
