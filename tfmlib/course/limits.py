"""Run somebody's code inside limits: of time, of memory, and of what it may leave behind.

Endless loops and runaway allocations end in an exception, so that the kernel survives. Output and warnings are
collected, not shown: nbgrader takes anything on stderr for a failure.
"""

import contextlib
import ctypes
import io
import os
import random
import signal
import sys
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import torch

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None

SECONDS = 10.0  # a check takes well under one
BYTES = 2 << 30  # more than any check needs, less than most machines have
_REPEAT_SECONDS = 0.2  # code that catches everything may swallow the first alarm
_COURSE = str(Path(__file__).parent)
LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})


class OutOfTime(BaseException):
    """The time limit has passed. Not an Exception, so that `except Exception` in the code does not swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block once `seconds` have passed."""
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        with _alarm(seconds):
            yield
    else:
        with _watchdog(seconds):
            yield


def _may_interrupt(frame: FrameType | None) -> bool:
    """Whether it is the judged code that runs, in a library or not, and not the course's own around it.

    An exception between the lines of a `finally` would leave things half undone.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_COURSE):
            return frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__")
        if not name.startswith(LIBRARIES):
            return True
        frame = frame.f_back
    return True


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    rings = 0

    def ring(signum, frame):
        nonlocal rings
        if not _may_interrupt(frame):
            return
        rings += 1
        if rings > 1:
            _raise_at_the_next_line(frame)
        raise OutOfTime

    old, trace = signal.signal(signal.SIGALRM, ring), sys.gettrace()
    signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        if rings > 1:
            sys.settrace(trace)


def _raise_at_the_next_line(frame: FrameType | None) -> None:
    """Interrupt code that swallows every exception: the `except` branch that it jumps to raises another."""

    def tracer(frame, event, arg):
        if event == "line":
            raise OutOfTime
        return tracer

    while frame is not None and not frame.f_code.co_filename.startswith(_COURSE):
        frame.f_trace = tracer
        frame = frame.f_back
    sys.settrace(lambda frame, event, arg: None)


@contextlib.contextmanager
def _watchdog(seconds: float) -> Iterator[None]:
    """For threads, and for systems without alarms: another thread raises the exception in this one."""
    here, done = threading.get_ident(), threading.Event()

    def watch():
        wait = seconds
        while not done.wait(wait):
            wait = _REPEAT_SECONDS
            if _may_interrupt(sys._current_frames().get(here)):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(here), ctypes.py_object(OutOfTime))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextlib.contextmanager
def memory_limit(n_bytes: int) -> Iterator[None]:
    """Let the process grow by at most `n_bytes` of address space within the block, on Linux; elsewhere do nothing.

    A larger allocation raises MemoryError, or torch's RuntimeError. Not used where a GPU is, whose driver
    reserves address space far beyond the memory that it uses.
    """
    used = _address_space()
    if used is None or torch.cuda.is_available():
        yield
        return
    torch.ones(256, 256) @ torch.ones(256, 256)  # start torch's threads now: one that cannot start ends the process
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + n_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int | None:
    if resource is None or not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    torchs = type(error) is RuntimeError and "can't allocate memory" in str(error)
    return torchs or isinstance(error, MemoryError)


class _Buffer(io.StringIO):
    """A buffer that code cannot close."""

    def close(self) -> None:
        """Stay open."""


class Collected:
    """What the code wrote, to stdout and stderr alike."""

    def __init__(self):
        self.text = ""


@contextlib.contextmanager
def collected_output() -> Iterator[Collected]:
    """Collect what the block writes, in Python or below it, and its warnings; nothing reaches the screen.

    Stream objects that the code took hold of earlier (a logging handler's, say) are collected too.
    """
    buffer, out = _Buffer(), Collected()
    with contextlib.ExitStack() as stack:
        low_level = stack.enter_context(tempfile.TemporaryFile())
        for fd in (1, 2):
            stack.enter_context(_redirected(fd, low_level.fileno()))
        for stream in (sys.stdout, sys.stderr):
            stack.enter_context(_writing_to(stream, buffer))
        stack.enter_context(contextlib.redirect_stdout(buffer))
        stack.enter_context(contextlib.redirect_stderr(buffer))
        stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        try:
            yield out
        finally:
            low_level.seek(0)
            out.text = buffer.getvalue() + low_level.read().decode(errors="replace")


@contextlib.contextmanager
def _redirected(fd: int, target: int) -> Iterator[None]:
    try:
        saved = os.dup(fd)
    except OSError:  # closed, as in some servers
        yield
        return
    os.dup2(target, fd)
    try:
        yield
    finally:
        os.dup2(saved, fd)
        os.close(saved)


@contextlib.contextmanager
def _writing_to(stream, buffer: io.StringIO) -> Iterator[None]:
    with contextlib.suppress(AttributeError, ValueError):  # a plain file takes no attribute: its descriptor is enough
        stream.flush()
        stream.write = buffer.write
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError, ValueError):
            stream.flush()
            del stream.write


def _set_deterministic(wanted: bool) -> None:
    """Torch loads its compiler, seconds long, to set this: so only where it was changed."""
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)


@contextlib.contextmanager
def state_kept() -> Iterator[None]:
    """Undo what the block does to torch's and Python's settings; let torch use one thread within it.

    The checks' tensors are tiny: on a busy machine, threads that wait for each other cost far more than they bring.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng(devices=[]))
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.callback(torch.set_default_device, torch.get_default_device())
        undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        undo.callback(_set_deterministic, torch.are_deterministic_algorithms_enabled())
        undo.callback(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled())
        undo.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(os.chdir, os.getcwd())
        torch.set_num_threads(1)
        yield
