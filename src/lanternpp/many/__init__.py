"""Many pictures: a file of prompts, a folder of PNGs, on this machine or over Ray."""
