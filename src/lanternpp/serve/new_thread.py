"""Computing outside the drawing thread without slowing that thread down."""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def run_in_new_thread(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function in a new thread that ends with the call; returns what it returns, raises what it raises.

    KeyboardInterrupt in the waiting thread is raised in the new thread as well.

    On a CPU every thread that computes with torch gets a pool of OpenMP threads, which lives as long as the thread does.
    Once the process has more OpenMP threads than cores, busy or not, OpenMP puts them to sleep between two operations
    instead of letting them spin: on two cores a picture of nature-128 then takes 1.4 s, not 0.9. So only the drawing
    thread of a server keeps its pool, and everything else that computes there is called through this function.
    """
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, "lanternpp-new-thread") as pool:
        thread = pool.submit(threading.get_ident).result()
        result = pool.submit(lambda: context.run(call, *args, **options))
        try:
            return result.result()
        except KeyboardInterrupt:
            # Only the waiting was interrupted. The thread has to end first: torch aborts if the program exits while it computes.
            if not result.done():
                _raise(KeyboardInterrupt, thread)
            raise


def _raise(kind: type[BaseException], thread: int) -> None:
    """Raise an exception in another thread, by its identifier, at the next Python instruction that it runs."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
