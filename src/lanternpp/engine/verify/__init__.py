"""The verification of drafts: token by token, jointly, and of continuous latents."""
