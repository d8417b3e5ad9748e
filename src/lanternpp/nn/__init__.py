"""The one network, and how its weights are read, written and laid out."""
