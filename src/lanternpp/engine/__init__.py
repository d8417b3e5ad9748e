"""The loop, and the few things it is made of: cache, guidance, noise, sampling, verification."""
