"""What computes beside the thread that draws, without slowing it down."""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def aside(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call it in a thread that ends with the call; returns what it returns, raises what it raises. Ctrl-C ends both.

    On a CPU every thread that computes with torch gets OpenMP threads of its own, which live as long as it does. Where
    the process has more of them than cores, busy or not, OpenMP lets them sleep between two operations, where else they
    would spin: on two cores a picture of nature-128 then takes 1.4 s, not 0.9. So only the thread that draws keeps its
    own, and all else that computes in a server goes through here.
    """
    answer: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            answer.set_result(context.run(call, *args, **options))
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="lanternpp-aside", daemon=True)
    try:
        thread.start()
        return answer.result()
    except KeyboardInterrupt:
        if not answer.done():  # only this wait was interrupted; torch aborts where a program ends under it
            _raise(KeyboardInterrupt, thread)
        raise
    finally:
        if thread.is_alive():
            thread.join()


def _raise(kind: type[BaseException], thread: threading.Thread) -> None:
    """Raise it in a thread, at what that runs next in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
