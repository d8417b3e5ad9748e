"""Computing outside the drawing thread without slowing the drawing thread down."""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def run_in_new_thread(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function in a new thread that ends with the call; return its result, or raise its error.

    KeyboardInterrupt in the waiting thread is raised in the new thread as well.

    On a CPU every thread that computes with torch gets a pool of OpenMP threads, which lives as long as the thread does.
    Once the process has more OpenMP threads than cores, busy or not, OpenMP puts them to sleep between two operations
    instead of letting them spin: on two cores a picture of nature-128 then takes 1.4 s, not 0.9. So only the drawing
    thread of a server keeps its pool, and everything else that computes there is called through this function.
    """
    context, future = contextvars.copy_context(), Future[T]()
    with ThreadPoolExecutor(1, "lanternpp-new-thread") as pool:
        thread = pool.submit(threading.get_ident).result()
        try:
            future = pool.submit(lambda: context.run(call, *args, **options))
            # A wait without a timeout misses a signal that arrives just before it.
            while not wait([future], 1).done:
                pass
            return future.result()
        except KeyboardInterrupt:
            # Only the waiting was interrupted. The new thread has to end first: torch aborts if the program exits while a
            # thread computes. So the exception is raised in it too, at the next Python instruction that it runs.
            if not future.done():
                error = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
            raise
