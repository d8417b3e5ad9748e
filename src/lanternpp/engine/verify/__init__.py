"""The verification of drafts of codes: token by token, and jointly."""
