"""The decoding loop and its parts: cache, guidance, noise, sampling, verification."""
