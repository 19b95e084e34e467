# SPDX-License-Identifier: Apache-2.0
"""Where the warm server of an environment listens.

One server belongs to one user and one environment: interpreter, kvconform, vLLM, and the
environment variables that may change what importing vLLM does. Its socket has the digest of these
as its name, in a directory that only the user can enter.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import kvconform
from kvconform.compat import installed
from kvconform.errors import EnvironmentProblem


class NotPrivate(EnvironmentProblem):
    """There is no place for a socket that only this user can reach."""


IGNORED = (
    "_",
    "COLORTERM",
    "COLUMNS",
    "DBUS_*",
    "DISPLAY",
    "EDITOR",
    "FORCE_COLOR",
    "GPG_*",
    "HIST*",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LINES",
    "LS_COLORS",
    "MAIL",
    "NO_COLOR",
    "OLDPWD",
    "PAGER",
    "PS1",
    "PWD",
    "PYTEST_*",
    "SHLVL",
    "SSH_*",
    "STY",
    "TERM",
    "TERM_*",
    "TMUX*",
    "VISUAL",
    "VSCODE_*",
    "VTE_*",
    "WAYLAND_DISPLAY",
    "WINDOWID",
    "XDG_SESSION_*",
    "KVCONFORM_SERVER_IDLE",
)
"""Environment variables (globs) that do not change what importing vLLM does.

All others count: a server that is started in vain costs seconds, a wrong one a wrong verdict. The
processes of a run get all variables of the command that asked for it, these included.
"""

LONGEST = 96
"""Bytes that the path of a socket may have: systems allow 104, and the second has more digits."""


def socket_of(environment: Mapping[str, str]) -> Path:
    """Return the path of the socket of the server for this environment.

    Its directory need not exist. NotPrivate if it is not the user's own, or the path too long.
    """
    path = directory() / f"{digest(environment)}.sock"
    if len(os.fsencode(path)) > LONGEST:
        raise NotPrivate(
            f"the path of the warm server's socket is too long for this system: {path}; "
            "set XDG_RUNTIME_DIR or TMPDIR to a shorter directory"
        )
    return path


def directory() -> Path:
    """Return the directory of the sockets, which the user alone may enter; it need not exist.

    It lies in XDG_RUNTIME_DIR, or in the directory for temporary files. NotPrivate if it belongs to
    another user, or if others may enter it.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir() and os.access(given, os.W_OK):
        found = Path(given) / "kvconform"
    else:
        found = Path(tempfile.gettempdir()) / f"kvconform-{os.getuid()}"
    try:
        # Links are not followed: in a directory that others can write to, it may be theirs.
        state = found.lstat()
    except FileNotFoundError:
        return found
    private = (
        stat.S_ISDIR(state.st_mode)
        and state.st_uid == os.getuid()
        and stat.S_IMODE(state.st_mode) & 0o077 == 0
    )
    if not private:
        raise NotPrivate(
            f"the warm server needs {found} as a directory of yours with mode 0700; "
            "remove it, or set XDG_RUNTIME_DIR to a private directory"
        )
    return found


def make_directory() -> None:
    """Create the directory of the sockets. NotPrivate if that is impossible."""
    found = directory()
    try:
        found.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NotPrivate(
            f"the directory {found} of the warm server cannot be made: {error.strerror or error}"
        ) from None
    directory()  # another user may have been faster


def digest(environment: Mapping[str, str]) -> str:
    """Return 16 hexadecimal digits that identify interpreter, kvconform, vLLM and environment."""
    parts = [sys.executable, sys.prefix, sys.version, str(kvconform.__path__[0]), *_vllm()]
    for name in sorted(environment):
        if not any(fnmatch.fnmatchcase(name, glob) for glob in IGNORED):
            parts.append(f"{name}={environment[name]}")
    text = "\0".join(parts).encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:16]


def _vllm() -> list[str]:
    """Return vLLM's version, and the directory that this process would import, if there is one."""
    return [str(installed.vllm_version()), str(installed.vllm_root())]
