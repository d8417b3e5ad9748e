"""What pictures are worth and what they cost: quality against a reference, and time."""
