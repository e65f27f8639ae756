"""Decoding by processes: the bytes of threads, whatever cannot be read, and whatever happens to a process."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from data.sample_images import image_of, picture, table_of
from PIL import Image

from rankgrad.data import decode_processes, image_cache, image_files, worker_process
from rankgrad.data.decode_processes import DecodeProcesses, close_gaps, places_of
from rankgrad.data.image_cache import open_images
from rankgrad.data.image_files import ImageDecoder, UnreadableImageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


@pytest.fixture
def many(monkeypatch):
    """Any table is large enough, and any machine."""
    monkeypatch.setattr(decode_processes, "LEAST_IMAGES", 1)
    monkeypatch.setattr(decode_processes, "IMAGES_AT_ONCE", 2)
    monkeypatch.setattr(decode_processes, "HEADERS_AT_ONCE", 3)


def opened(table, cache, workers=4, **settings):
    return open_images(table, side=24, cache=cache, **{"square": False, "progress": False, "workers": workers, **settings})


def cut(path):
    path.write_bytes(path.read_bytes()[:-60])


@pytest.mark.parametrize("square", [False, True])
def test_the_bytes_are_those_of_threads(many, folder, tmp_path, square, monkeypatch):
    by_threads, _ = opened(folder, tmp_path / "threads", workers=1, square=square)
    monkeypatch.setattr(image_cache, "map_images", None)
    images, table = opened(folder, tmp_path / "processes", square=square)
    assert table is folder
    assert torch.equal(images.flat, by_threads.flat)
    assert torch.equal(images.shapes, by_threads.shapes)
    assert not multiprocessing.active_children()


def test_images_that_cannot_be_read_leave_no_gap(many, folder, tmp_path):
    cut(folder.file(0))  # found when it is decoded
    folder.file(2).write_text("no image")  # found in its header
    cut(folder.file(3))
    folder.file(5).unlink()
    with pytest.warns(UserWarning, match="skipped 4 of 6 images that cannot be read"):
        images, table = opened(folder, tmp_path / "cache", skip_bad=True)
    assert table.paths == ("1.png", "4.png")
    assert [message.partition(" ")[0] for message in images.skipped] == [str(folder.file(row)) for row in (0, 2, 3, 5)]
    expected, _ = opened(table, None)
    assert torch.equal(images.flat, expected.flat)
    with pytest.raises(UnreadableImageError, match="2 of 6 images that cannot be read"):  # before anything is decoded
        opened(folder, tmp_path / "other")
    assert not multiprocessing.active_children()


def test_after_ten_errors_nothing_more_is_decoded(many, tmp_path, monkeypatch):
    decoded = tmp_path / "decoded"
    decoded.mkdir()

    def planes(decoder, row):
        (decoded / str(row)).touch()
        time.sleep(0.01)
        raise UnreadableImageError(f"{row} is bad")

    monkeypatch.setattr(ImageDecoder, "planes", planes)
    Image.fromarray(picture(30, 40, 0)).save(tmp_path / "0.png")
    with pytest.raises(UnreadableImageError, match="10 of 2,000 images"):
        opened(table_of(tmp_path, ["0.png"] * 2000), tmp_path / "cache", square=True)
    assert len(list(decoded.iterdir())) < 500
    assert not list((tmp_path / "cache").iterdir())


def test_a_process_that_is_ended_is_a_sentence(many, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageDecoder, "planes", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ChildProcessError, match=r"^a process that decodes fake/train has ended, .* fewer than 4 \(--workers\)"):
        opened(folder, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("victim", ["busy", "idle"])
def test_the_other_processes_end_with_the_first(folder, tmp_path, victim):
    (tmp_path / "busy").mkdir()
    code = (
        "import os, signal, sys, threading, time, numpy as np; from multiprocessing import active_children\n"
        "from pathlib import Path; from rankgrad.data.table import Table\n"
        "from rankgrad.data import decode_processes; from rankgrad.data.image_cache import open_images\n"
        "from rankgrad.data.image_files import ImageDecoder\n"
        "root, cache, busy = map(Path, sys.argv[1:4])\n"
        "decode_processes.LEAST_IMAGES, decode_processes.IMAGES_AT_ONCE = 1, 2\n"
        "def planes(decoder, row): (busy / str(os.getpid())).touch(); time.sleep(600)\n"
        "ImageDecoder.planes = planes\n"
        "def kill():\n"
        "    while len(list(busy.iterdir())) < 3: time.sleep(0.05)\n"
        "    at_work = {int(path.name) for path in busy.iterdir()}\n"
        "    idle = {child.pid for child in active_children()} - at_work\n"
        "    os.kill(min(at_work if sys.argv[4] == 'busy' else idle), signal.SIGKILL)\n"
        "threading.Thread(target=kill, daemon=True).start()\n"
        "table = Table('fake/train', root, tuple(f'{i}.png' for i in range(6)), np.arange(6))\n"
        "try: open_images(table, side=24, cache=cache, square=False, workers=4, progress=False)\n"
        "except ChildProcessError as error: print(len(active_children()), 'left:', error)"
    )
    run = [sys.executable, "-c", code, *map(str, (folder.root, tmp_path / "cache", tmp_path / "busy")), victim]
    said = subprocess.run(run, check=True, capture_output=True, text=True, timeout=30).stdout
    assert said.startswith("0 left: a process that decodes fake/train has ended")
    assert not list((tmp_path / "cache").iterdir())


def test_an_interrupt_while_processes_start_ends_all_of_them(folder, tmp_path):
    code = (
        "import os, signal, sys, threading, time, numpy as np; from multiprocessing import active_children\n"
        "from pathlib import Path; from rankgrad.data.table import Table\n"
        "from rankgrad.data import decode_processes; from rankgrad.data.image_cache import open_images\n"
        "root, cache = map(Path, sys.argv[1:])\n"
        "decode_processes.LEAST_IMAGES = 1\n"
        "forked = threading.Event()\n"
        "os.register_at_fork(after_in_parent=lambda: (forked.set(), time.sleep(0.1)), after_in_child=lambda: time.sleep(0.5))\n"
        "def interrupt():\n"
        "    forked.wait()\n"
        "    os.killpg(0, signal.SIGINT)\n"
        # a job in the background of a shell inherits that SIGINT is ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        # with the mask of a thread that waits, or this one would take the signal of the process
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})\n"
        "table = Table('fake/train', root, tuple(f'{i}.png' for i in range(6)), np.arange(6))\n"
        "try: open_images(table, side=24, cache=cache, square=False, workers=4, progress=False)\n"
        "except KeyboardInterrupt: print(len(active_children()), 'left')"
    )
    run = [sys.executable, "-c", code, str(folder.root), str(tmp_path / "cache")]
    # threads of a numerical library would take the signal, too
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(run, check=True, capture_output=True, text=True, timeout=30, start_new_session=True, env=one_thread)
    assert (ended.stdout, ended.stderr) == ("0 left\n", "")


def test_a_file_that_changes_meanwhile_is_named(many, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageDecoder, "planes", lambda decoder, row: np.zeros((3, 24, 5), np.uint8))
    with pytest.raises(UnreadableImageError, match=r"0\.png has changed since its header was read"):
        opened(folder, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_full_disk_is_a_sentence(many, folder, tmp_path):
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(OSError, match="the disk or quota is full; nothing was left there"):
            opened(folder, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list((tmp_path / "cache").iterdir())


def test_processes_end_with_their_parent(folder, tmp_path):
    code = (
        "import os, sys, time, numpy as np; from pathlib import Path; from rankgrad.data.table import Table\n"
        "from rankgrad.data import decode_processes; from rankgrad.data.image_cache import open_images\n"
        "from rankgrad.data.image_files import ImageDecoder\n"
        "root, cache = map(Path, sys.argv[1:])\n"
        "decode_processes.LEAST_IMAGES = 1\n"
        "def planes(decoder, row): print(os.getpid(), flush=True); time.sleep(600)\n"
        "ImageDecoder.planes = planes\n"
        "table = Table('fake/train', root, tuple(f'{i}.png' for i in range(6)), np.arange(6))\n"
        "open_images(table, side=24, cache=cache, square=False, workers=4, progress=False)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder.root), str(tmp_path / "cache")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()  # its number stays taken, since nothing has asked yet how it ended
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                os.kill(worker, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
        os.kill(worker, signal.SIGKILL)
        pytest.fail("a worker outlived its parent")


def test_a_worker_of_a_fork_server_lives_while_it_is_needed():
    worker = multiprocessing.get_context("forkserver").Process(target=worker_for_three_checks)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0


def worker_for_three_checks():
    worker_process.init_worker()
    time.sleep(3 * worker_process.PARENT_CHECK)


def test_threads_where_there_are_few_images_or_few_cores_or_no_children(many, folder, monkeypatch):
    decoder = ImageDecoder(folder, 24, square=False)

    def by_processes(workers):
        with DecodeProcesses.of(decoder, workers) as processes:
            return processes is not None

    assert by_processes(4)
    assert not by_processes(3)
    monkeypatch.setattr(decode_processes, "LEAST_IMAGES", 7)
    assert not by_processes(4)
    monkeypatch.setattr(decode_processes, "LEAST_IMAGES", 6)
    assert by_processes(4)
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    assert not by_processes(4)


def test_gaps(tmp_path):
    shapes = [(1, 1), UnreadableImageError("bad"), (2, 1), (1, 3), (1, 1)]
    places = places_of(shapes)
    assert [(row, begin) for row, begin, _ in places] == [(0, 0), (2, 3), (3, 9), (4, 18)]
    path = tmp_path / "file"
    path.write_bytes(bytes(range(21)))
    close_gaps(path, places, {2, 4})
    assert list(path.read_bytes()) == [3, 4, 5, 6, 7, 8, 18, 19, 20]


def test_boxes_and_orientation_as_in_threads(many, tmp_path):
    exif = Image.Exif()
    exif[image_files.ORIENTATION_TAG] = 6
    for row in range(3):
        Image.fromarray(picture(40 + row, 60, row)).save(tmp_path / f"{row}.jpg", exif=exif)
    table = table_of(
        tmp_path, [f"{row}.jpg" for row in range(3)], boxes=np.array([[0.0, 0, 30, 20], [np.nan] * 4, [5, 5, 50, 40]])
    )
    images, _ = opened(table, tmp_path / "cache")
    expected, _ = opened(table, None)
    assert all(torch.equal(image_of(images, row), image_of(expected, row)) for row in range(3))
