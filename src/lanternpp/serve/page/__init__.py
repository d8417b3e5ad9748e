"""The page at /: plain decoding and a method race from the same seed, in a browser."""

from lanternpp.serve.page.mount import mount_page

__all__ = ["mount_page"]
