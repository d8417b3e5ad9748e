"""The page at /: plain decoding and a method draw the same picture side by side in a browser.

The page is a few static files. It uses the server's API as any other client does: a race is two streamed requests of
/v1/images/generations, and the server keeps nothing of it.
"""

from lanternpp.serve.page.routes import FILES, routes

__all__ = ["FILES", "routes"]
