"""Runs programs that a model wrote, each in a process of its own; against accidents, not against an attacker.

An audit hook of Python refuses all but computing and reading files: sockets, processes, signals, ctypes and writing. On
Linux, a namespace has no network besides, where users may make one. Modules are those of the standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

TIME_LIMIT_S = 5
"""Processor time of a program; its wall time is three times as long, for machines that are busy."""

_MEMORY_BYTES = 2**30
_PASSED = 86
"""Exit code of a program that came to its end; exit() in a program has another one."""

_ALLOWED = {
    *("import", "compile", "exec", "marshal.loads", "code.__new__", "function.__new__", "builtins.id", "time.sleep"),
    *("os.listdir", "os.scandir", "object.__getattr__", "object.__setattr__", "sys._getframe", "array.__new__"),
}
"""Audit events, besides `open` for reading."""


def run(program: str) -> str:
    """`passed` if a program comes to its end without an exception, else `failed` or `timed out`."""
    command = [sys.executable, "-s", "-S", "-P", __file__, str(TIME_LIMIT_S)]
    variables = {x: os.environ[x] for x in ("LD_LIBRARY_PATH",) if x in os.environ} | {"PYTHONHASHSEED": "0"}
    options: Any = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL) | {"start_new_session": True}
    with tempfile.TemporaryDirectory() as folder:
        options |= {"input": program.encode(errors="replace"), "cwd": folder, "env": variables}
        try:
            done = subprocess.run(command, timeout=3 * TIME_LIMIT_S, check=False, **options)
        except subprocess.TimeoutExpired:
            return "timed out"
    if done.returncode in (-24, -9):  # SIGXCPU, SIGKILL
        return "timed out"
    return "passed" if done.returncode == _PASSED else "failed"


def works() -> bool:
    """Whether programs run here at all, and sockets, processes and writing are refused."""
    refused = ("import socket; socket.socket()", "import os; os.fork()", "open('x', 'w')", "import os; os.mkdir('x')")
    return run("") == "passed" and all(run(program) == "failed" for program in refused)


def confine(time_limit_s: int) -> None:
    """Limits this process, and leaves its network, if the kernel lets it."""
    import ctypes
    import resource

    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER, which lets users do the other, CLONE_NEWNET
    for name, limit in {"CPU": time_limit_s, "AS": _MEMORY_BYTES, "FSIZE": 0, "NPROC": 0, "CORE": 0}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard),) * 2)


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """The audit hook; PermissionError for what a program may not do."""
    reading = event == "open" and not int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    if not reading and event not in _ALLOWED:
        raise PermissionError(event)


if __name__ == "__main__":
    _program = sys.stdin.read()
    confine(int(sys.argv[1]))
    sys.addaudithook(refuse)
    try:
        exec(_program, {"__name__": "__main__"})
    except BaseException:
        os._exit(1)
    os._exit(_PASSED)
