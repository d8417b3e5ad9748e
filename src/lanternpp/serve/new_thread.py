"""Computing outside the drawing thread without slowing that thread down."""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
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
    result: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(call, *args, **options))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="lanternpp-new-thread", daemon=True)
    try:
        thread.start()
        return result.result()
    except KeyboardInterrupt:
        # Only the waiting was interrupted. The thread has to end first: torch aborts if the program exits while it computes.
        if not result.done():
            _raise(KeyboardInterrupt, thread)
        raise
    finally:
        if thread.is_alive():
            thread.join()


def _raise(kind: type[BaseException], thread: threading.Thread) -> None:
    """Raise an exception in another thread, at the next Python instruction that it runs."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
