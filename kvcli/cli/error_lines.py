"""What a command says of an error: one line, and the exit code."""

from __future__ import annotations

import errno

from kvcli.errors import KvcliError, Terminated


def describe_error(
    error: BaseException, resumes: bool = True, saves_memory: str = "", ranks: bool = False
) -> tuple[int, str]:
    """The exit code and the message of an error, one line.

    Args:
        error: any error.
        resumes: whether the command keeps what was finished when it is interrupted.
        saves_memory: what to do when memory does not suffice.
        ranks: whether several processes share the run.
    """
    text = " ".join(str(error).split())
    if isinstance(error, KvcliError):
        return error.exit_code, text
    if isinstance(error, KeyboardInterrupt):
        what = "terminated" if isinstance(error, Terminated) else "interrupted"
        advice = "run the same command again to resume" if resumes else "run the same command again to start over"
        shared = (
            ", as torchrun does with all ranks when one has ended" if isinstance(error, Terminated) and ranks else ""
        )
        return getattr(error, "exit_code", 130), f"{what}{shared}; {advice}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" ({error.filename})" if error.filename else ""
        return 1, f"the disk is full{where}; what was finished is kept: free some space and run the same command again"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return 1, f"cannot write to {error.filename}: permission denied, or it is read-only; choose another place"
    if isinstance(error, OSError):
        return 1, f"{error.strerror or text}: {error.filename}; choose another path" if error.filename else text
    of_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text  # a GPU's, or a RuntimeError
    if isinstance(error, MemoryError) or of_torch:
        return 1, f"out of memory; {saves_memory or 'end other programs, or use a machine with more'}"
    if type(error).__name__ == "SafetensorError":
        if "No space left" in text:
            return 1, "the disk is full; what was finished is kept: free some space and run the same command again"
        return 1, text
    return 1, f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback, and report it)"
