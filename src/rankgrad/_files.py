"""Files and folders that are complete or absent, locks, and the words for a full disk.

Everything is written under a temporary name beside its place, `.writing-<token>-<name>`, and moved there when it is complete.
The writer holds a lock on the temporary name, so what a killed process left behind can be told from what is still being
written, and the next write into the same folder removes it. New files and folders get the permissions that the umask leaves.
"""

import contextlib
import errno
import importlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

# not on Windows: nothing is locked there, and leftovers stay
fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None

_TEMPORARY = re.compile(r"\.writing-[0-9a-f]{8}-.+", re.DOTALL)


def write_durably(path: Path, content: bytes | str) -> None:
    """Write a file and return when it is on disk. Text is written as UTF-8."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes | str) -> None:
    """Write a file, or replace the one that is there, in one move: readers see the old content or the new, never a part."""
    with atomic_file(path) as unfinished:
        write_durably(unfinished, content)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, with the suffix of `path`; on success it replaces `path` in one move.

    The file exists already and is empty. On an error it is removed and `path` stays as it was.
    """
    sweep(path.parent)
    unfinished, descriptor = _create(path, folder=False)
    try:
        yield unfinished
        if descriptor is not None:
            os.fsync(descriptor)
        unfinished.replace(path)
        sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def atomic_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to write to; on success it becomes `folder` in one move, on an error it is removed.

    Args:
        folder: its parents are made. It may exist if it is empty.
        replace: delete what `folder` holds once the new content is complete.
    """
    if not replace and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists and is not empty: choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    unfinished, descriptor = _create(folder, folder=True)
    try:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            if path == unfinished or path.is_file():
                _sync(path)
        if folder.exists():
            remove_folder(folder) if replace else folder.rmdir()
        unfinished.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Delete a folder. It is renamed first, so that a half-deleted one is never taken for the whole."""
    shutil.rmtree(folder.rename(_temporary_name(folder.with_name(f"{folder.name}-deleted"))))


def sweep(folder: Path) -> None:
    """Remove temporary files and folders that processes which no longer run left in `folder`."""
    if fcntl is None or not folder.is_dir():
        return
    for leftover in folder.glob(".writing-*"):
        if not _TEMPORARY.fullmatch(leftover.name):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink()
            finally:
                os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on disk: a rename is durable only then."""
    _sync(folder)


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for lack of space: on the disk, in the quota, or under the limit on file sizes."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_error_reason(error: OSError) -> str:
    """Why a file could not be written, in a few words."""
    return "the disk or quota is full" if is_disk_full(error) else (error.strerror or str(error))


class LockedError(OSError):
    """Another process holds the lock."""


class FileLock:
    """A lock between processes, released when its process ends, however it ends.

        with FileLock(run / "lock", f"{run} is in use"):
            ...

    The file holds the process id and the host of its owner, for the message of whoever comes second. A file that a killed
    process left does not lock anything: the operating system releases the lock on it. On file systems without locks, and on
    Windows, the existence of the file is the lock, and it is stale when its process no longer runs on this host.

    Args:
        path: the lock file; its folder must exist.
        refusal: how the message of `LockedError` begins.
    """

    def __init__(self, path: Path, refusal: str) -> None:
        self.path, self.refusal = path, refusal
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise `LockedError`; never waits."""
        while self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not self._lock(descriptor):
                    raise LockedError(f"{self.refusal}{_owner_text(self._owner(), self.path)}")
                # the owner before may have removed the name between open and lock
                if _is_same_file(descriptor, self.path):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def release(self) -> None:
        """Give the lock back and remove its file."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "FileLock":
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _lock(self, descriptor: int) -> bool:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # this file system has no locks
                pass
            else:
                return True
        owner = self._owner()
        if owner is None:
            return True
        pid, host = owner
        return host == socket.gethostname() and not _is_running(pid)

    def _owner(self) -> tuple[int, str] | None:
        try:
            content = json.loads(self.path.read_bytes())
            return int(content["pid"]), str(content["host"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def _owner_text(owner: tuple[int, str] | None, path: Path) -> str:
    if owner is None:
        return " by another process"
    pid, host = owner
    if host == socket.gethostname():
        return f" by process {pid}"
    # where the file system has no locks, nobody here can tell whether a process of another host still runs
    return f" by process {pid} on {host}; if it no longer runs there, delete {path}"


def _is_running(pid: int) -> bool:
    if os.name != "posix":  # signal 0 means something else there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


def _create(path: Path, *, folder: bool) -> tuple[Path, int | None]:
    """A locked temporary file or folder for `path`, and the descriptor that holds the lock where there are locks."""
    while True:
        unfinished = _temporary_name(path)
        unfinished.mkdir() if folder else unfinished.touch(exist_ok=False)
        if fcntl is None:
            return unfinished, None
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            descriptor = os.open(unfinished, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks: leftovers stay
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_same_file(descriptor, unfinished):
                return unfinished, descriptor
            os.close(descriptor)


def _temporary_name(path: Path) -> Path:
    # a name may have 255 bytes; its end holds the suffix, by which some writers choose the format
    end = path.name.encode(errors="surrogateescape")[-200:].decode(errors="ignore")
    return path.with_name(f".writing-{secrets.token_hex(4)}-{end}")


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sync(path: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
