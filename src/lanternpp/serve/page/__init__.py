"""The page at /: plain decoding and a method race from the same seed, in a browser.

It is three files that any browser shows as they are, and a client of the server's own API like any other: a race is two
streamed requests of /v1/images/generations. The server keeps nothing of it.
"""

from lanternpp.serve.page.routes import FILES, router

__all__ = ["FILES", "router"]
