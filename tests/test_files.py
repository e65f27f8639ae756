import errno
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rankgrad import _files
from rankgrad._files import (
    FileLock,
    LockedError,
    atomic_file,
    atomic_folder,
    is_disk_full,
    remove_folder,
    replace_file,
    sweep,
    write_durably,
    write_error_reason,
)

# the module alone, without torch: these processes are to start quickly
START = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(_files.__file__).parent)!r})
import _files as f
folder = Path(sys.argv[1])
"""


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "result.json"
    for content in ("one", b"two", "drei ä"):
        replace_file(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert list(tmp_path.iterdir()) == [path]


def test_files_and_folders_have_the_permissions_that_the_umask_leaves(tmp_path, umask):
    replace_file(tmp_path / "file", "x")
    write_durably(tmp_path / "durable", "x")
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "x").touch()
    assert mode(tmp_path / "file") == mode(tmp_path / "durable") == 0o666 & ~umask
    assert mode(tmp_path / "folder") == 0o777 & ~umask


def test_an_error_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    replace_file(path, "old")

    def write_half():
        with atomic_file(path) as unfinished:
            unfinished.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_has_the_suffix_by_which_writers_choose_the_format(tmp_path):
    with atomic_file(tmp_path / "queries.npz") as unfinished:
        np.savez(unfinished, a=np.arange(3))
    with np.load(tmp_path / "queries.npz") as stored:
        assert stored["a"].tolist() == [0, 1, 2]
    replace_file(tmp_path / f"{'ä' * 120}.json", "long")
    assert len(list(tmp_path.iterdir())) == 2


def killed_while(code: str, folder: Path) -> None:
    """Run `code` in a process that is killed inside its innermost block."""
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", f"{START}{code}{kill}", str(folder)], check=False, timeout=100)
    assert done.returncode == -9


@pytest.mark.skipif(_files.fcntl is None, reason="needs locks on files")
def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path):
    killed_while("with f.atomic_file(folder / 'a') as p:\n    p.write_text('x')\n    ", tmp_path)
    killed_while("with f.atomic_folder(folder / 'b') as p:\n    (p / 'c').write_text('x')\n    ", tmp_path)
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.endswith("-b")
    (tmp_path / ".writing-mine").touch()
    replace_file(tmp_path / "other", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-mine", "other"]


@pytest.mark.skipif(_files.fcntl is None, reason="needs locks on files")
def test_what_is_being_written_is_not_swept(tmp_path):
    with atomic_file(tmp_path / "a") as file, atomic_folder(tmp_path / "b") as folder:
        (folder / "x").write_text("x")
        file.write_text("y")
        sweep(tmp_path)
        replace_file(tmp_path / "c", "z")
    assert (tmp_path / "a").read_text() == "y"
    assert (tmp_path / "b" / "x").read_text() == "x"


def test_a_folder_appears_whole(tmp_path):
    folder = tmp_path / "new" / "gallery"
    with atomic_folder(folder) as unfinished:
        (unfinished / "x").write_text("1")
        assert not folder.exists()
    assert (folder / "x").read_text() == "1"
    assert list(folder.parent.iterdir()) == [folder]
    with pytest.raises(FileExistsError, match="already exists and is not empty"), atomic_folder(folder):
        pass
    with pytest.raises(RuntimeError), atomic_folder(folder, replace=True):
        raise RuntimeError
    assert (folder / "x").read_text() == "1"
    with atomic_folder(folder, replace=True) as unfinished:
        (unfinished / "y").write_text("2")
    assert [path.name for path in folder.iterdir()] == ["y"]
    assert list(folder.parent.iterdir()) == [folder]
    (tmp_path / "empty").mkdir()
    with atomic_folder(tmp_path / "empty") as unfinished:
        (unfinished / "x").touch()
    remove_folder(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()


def test_a_lock_names_its_owner_and_ends_with_its_block(tmp_path):
    path = tmp_path / "lock"
    with FileLock(path, "runs/a is in use"):
        assert json.loads(path.read_text()) == {"pid": os.getpid(), "host": socket.gethostname()}
        with pytest.raises(LockedError, match=f"^runs/a is in use by process {os.getpid()}$"):
            FileLock(path, "runs/a is in use").acquire()
    assert not path.exists()
    with FileLock(path, "runs/a is in use"):
        pass


def test_a_lock_of_a_killed_process_is_free(tmp_path):
    killed_while("lock = f.FileLock(folder / 'lock', 'in use')\nlock.acquire()\n", tmp_path)
    assert (tmp_path / "lock").exists()
    with FileLock(tmp_path / "lock", "in use"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_lock_is_exclusive_between_processes(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    code = (
        f"{START}\ndone = 0\n"
        "while done < 200:\n"
        "    try:\n"
        "        with f.FileLock(folder / 'lock', 'in use'):\n"
        "            (folder / 'counter').write_text(str(int((folder / 'counter').read_text()) + 1))\n"
        "            done += 1\n"
        "    except f.LockedError:\n"
        "        pass\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(timeout=100) for process in processes] == [0, 0, 0]
    assert counter.read_text() == "600"


def test_without_locks_of_the_system_a_file_of_a_running_process_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "fcntl", None)
    path = tmp_path / "lock"
    with FileLock(path, "in use"), pytest.raises(LockedError, match=f"by process {os.getpid()}"):
        FileLock(path, "in use").acquire()
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(LockedError, match="in use by process 1 on elsewhere"):
        FileLock(path, "in use").acquire()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path.write_text(json.dumps({"pid": gone.pid, "host": socket.gethostname()}))
    with FileLock(path, "in use"):
        pass
    replace_file(tmp_path / "a", "x")
    with atomic_folder(tmp_path / "b") as folder:
        (folder / "x").touch()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]


def test_words_for_a_full_disk():
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert is_disk_full(OSError(number, os.strerror(number)))
        assert write_error_reason(OSError(number, os.strerror(number))) == "the disk or quota is full"
    assert write_error_reason(PermissionError(errno.EACCES, "Permission denied")) == "Permission denied"
    assert write_error_reason(OSError("odd")) == "odd"
