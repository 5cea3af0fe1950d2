"""Starts ``python -m fivefold…`` by a fork of the test process instead of a new interpreter.

A new interpreter imports torch for about three seconds of CPU time; the test process has it already. ``Popen`` keeps
its pipes, its exit codes and its signals; only the start of the program is replaced. What needs a new interpreter runs
within ``true_interpreters()``, which also decorates a test.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import logging
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fivefold.record import Record

START_INTERPRETER = subprocess.Popen._execute_child  # type: ignore[attr-defined]
PYTHON = sys.executable  # a test may replace it
DEFAULT_TORCH_SEED = 67280421310721  # of a fresh interpreter
KEPT: list[object] = []  # so that nothing of it is finalized
HUGE_PAGE, MADV_COLLAPSE = 2 << 20, 25
FORKS_BETWEEN = 50  # of two calls that join pages, which forks split up where they are written


def fork_interpreters() -> None:
    """From here on this process, and those that it forks, start ``python -m fivefold…`` by a fork."""
    subprocess.Popen._execute_child = fork_python  # type: ignore[attr-defined]


def import_what_runs_load() -> None:
    """Load, once before a fork and not in each child, what a run imports when it begins, and the schemas of records."""
    global _forks
    if _forks % FORKS_BETWEEN == 0:
        _join_pages()
    _forks += 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        import fivefold.rendering.report
        import fivefold.trainer.optimizers.adamw  # noqa: F401
    _build_schemas(Record)


_forks = 0


def _join_pages() -> None:
    """Join this process's pages into huge ones, where Linux can (6.1): a fork copies an entry of each, and frees it.

    With 350 MB of pages a fork that does nothing costs 30 ms of CPU, and 11 ms afterwards.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with suppress(OSError):
        for area in Path("/proc/self/maps").read_text().splitlines():
            if anonymous := re.match(r"(\w+)-(\w+) rw.p \S+ \S+ 0\b", area):
                begin, end = (int(address, 16) for address in anonymous.groups())
                for page in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                    madvise(page, HUGE_PAGE, MADV_COLLAPSE)


def _build_schemas(record: type[Record]) -> None:
    """Build the schemas of all records, which each child would build for itself when it validates one."""
    for kind in record.__subclasses__():
        if not kind.__pydantic_complete__:
            kind.model_rebuild(raise_errors=False)
        _build_schemas(kind)


@contextmanager
def true_interpreters() -> Iterator[None]:
    """Start new interpreters, as a user does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subprocess.Popen, "_execute_child", START_INTERPRETER)
        yield


def find_module(args: object) -> list[str] | None:
    """Return the module and arguments if ``args`` is ``python -m fivefold…`` without options that change Python."""
    if isinstance(args, str | bytes | os.PathLike) or not isinstance(args, Sequence):
        return None
    words = [os.fspath(word) for word in args]
    if words[:1] != [PYTHON]:
        return None
    words = words[2:] if words[1:2] == ["-P"] else words[1:]
    return words[1:] if words[:1] == ["-m"] and words[1:] and words[1].split(".")[0] == "fivefold" else None


def fork_python(process: Any, args: Any, *options: Any) -> None:
    """Stand in for ``Popen._execute_child``, whose positional arguments ``options`` are (CPython 3.11 to 3.14)."""
    (
        executable,
        preexec_fn,
        close_fds,
        pass_fds,
        cwd,
        env,
        _,
        _,
        shell,
        stdin_read,
        stdin_write,
        stdout_read,
        stdout_write,
        stderr_read,
        stderr_write,
        _,
        gid,
        gids,
        uid,
        umask,
        start_new_session,
        process_group,
    ) = options
    module = find_module(args)
    unusual = executable or shell or pass_fds or gids or (gid, uid, umask) != (None, None, -1) or process_group != -1
    if module is None or unusual or not close_fds:
        START_INTERPRETER(process, args, *options)
        return
    import_what_runs_load()
    sys.stdout.flush()
    sys.stderr.flush()
    process.pid = os.fork()
    if process.pid == 0:
        code = 1
        try:
            _use_streams(stdin_read, stdout_write, stderr_write)
            if cwd is not None:
                os.chdir(cwd)
            if env is not None:
                variables = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
                os.environ.clear()
                os.environ.update(variables)
            if start_new_session:
                os.setsid()
            if preexec_fn is not None:
                preexec_fn()
            # The environment and command line in /proc stay those of the test process; the name says the rank.
            Path("/proc/self/comm").write_text(f"fivefold rank {os.environ.get('RANK', '-')}")
            code = _run(module)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    process._child_created = True
    process._close_pipe_fds(stdin_read, stdin_write, stdout_read, stdout_write, stderr_read, stderr_write)


def _use_streams(*ends: int) -> None:
    """Make ``ends`` the standard streams (-1 keeps one), and give no other descriptor of the parent to the child."""
    copies = [os.dup(end) if end != -1 else os.dup(number) for number, end in enumerate(ends)]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        # Not closed: an object of the parent that is freed here would then close another file of the same number.
        if (number := int(name)) > 2 and number != null:
            with suppress(OSError):  # the descriptor that lists them
                os.dup2(null, number, inheritable=False)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", buffering=number, closefd=False, errors=[None, "backslashreplace"][number - 1])  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> int:
    """Run ``python -m WORDS`` as a new interpreter would, and return its exit code."""
    _reset()
    module, *arguments = words
    sys.argv = [module, *arguments]
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code if isinstance(code, int) else 0


def _reset() -> None:
    """Put back what the tests have changed of the interpreter and of torch."""
    import torch

    gc.enable()
    gc.freeze()  # what the parent has not collected is not ours: its threads are not here to answer
    atexit._clear()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", module="runpy")
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    asyncio._set_running_loop(None)
    random.seed()
    _forget_process_groups()
    torch.manual_seed(DEFAULT_TORCH_SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _forget_process_groups() -> None:
    """Leave the parent's process groups, whose threads are not here, without ending them: that would wait for those."""
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world
    for groups in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
    ):
        KEPT.append(dict(groups))
        groups.clear()
    KEPT.append(world.default_pg)
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    world.group_count = 0
