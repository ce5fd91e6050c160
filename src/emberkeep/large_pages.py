"""Large memory pages for the model and its state.

Every token is computed from all weights, and what fetches memory ahead stops at the end of a page: with pages of
2 MiB instead of 4 KiB a decode step took 8 % less time, and a context was opened in a seventh of it. Linux gives
them to programs that ask; glibc asks on behalf of one that was started with a variable.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as type checkers know it: the first of two processes imports as little as it can
if TYPE_CHECKING:
    from collections.abc import Mapping

_TUNABLE = "glibc.malloc.hugetlb"
_VARIABLE = "GLIBC_TUNABLES"
_MARK = "_EMBERKEEP_LARGE_PAGES"
_MODES = "/sys/kernel/mm/transparent_hugepage/enabled"


def ask_for_large_pages() -> None:
    """Start this process anew as one that asks, with the same arguments and id, where that changes anything.

    To be called before anything else is done. What the new one starts itself is not concerned.
    """
    environment = asking(os.environ, mode())
    if environment is None or not sys.executable:
        _forget()
        return
    try:
        os.execve(sys.executable, sys.orig_argv, environment)
    except OSError:  # then with small ones
        return


def asking(variables: Mapping[str, str], mode: str | None) -> dict[str, str] | None:
    """The environment of a process that asks; None where it would not help, or does so already. Pure."""
    given = variables.get(_VARIABLE, "")
    if mode != "madvise" or _TUNABLE in given:
        return None
    tunables = f"{given}:{_TUNABLE}=1" if given else f"{_TUNABLE}=1"
    return {**variables, _VARIABLE: tunables, _MARK: given}


def mode() -> str | None:
    """Who gets large pages: `always` everyone, `madvise` who asks, `never` nobody; None where that is unknown."""
    if sys.platform != "linux" or not _has_glibc():
        return None
    try:
        with open(_MODES) as modes:  # noqa: PTH123 (pathlib would be imported twice: this process is started anew)
            return modes.read().partition("[")[2].partition("]")[0]
    except OSError:
        return None


def _has_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):
        return False


def _forget() -> None:
    """Give the variable the value back that it had, if it was set here."""
    before = os.environ.pop(_MARK, None)
    if before:
        os.environ[_VARIABLE] = before
    elif before is not None:
        os.environ.pop(_VARIABLE, None)
