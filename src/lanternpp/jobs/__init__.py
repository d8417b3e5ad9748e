"""Many pictures: from a file of prompts to a folder of PNGs, on this machine or on the workers of a Ray cluster."""
