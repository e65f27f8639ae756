"""`rankgrad study --jobs N`: the lines of a study at the same time, in processes that share a device.

A small network leaves a GPU idle while a run starts, evaluates and ends; runs of other processes fill these gaps.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rankgrad.runs.ledger import Ledger

# seconds between two looks at the ledger
LOOK = 1.0


def run_jobs(command: Sequence[str], jobs: int, folder: Path) -> int:
    """Run `rankgrad COMMAND --share i/N` in N processes, which write to `folder`; returns the largest exit status.

    Args:
        command: the command line without --jobs.
        jobs: number of processes.
        folder: of the study. What process i says goes to `job-i.txt` there.
    """
    ledger = Ledger(folder / "ledger.jsonl")
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    started: list[subprocess.Popen[bytes]] = []
    shown = len(ledger)
    print(f"{jobs} processes; what they say is in {folder / 'job-*.txt'}", flush=True)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        for number in range(jobs):
            with (folder / f"job-{number + 1}.txt").open("w", encoding="utf-8") as said:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "rankgrad.cli", *command, "--share", f"{number + 1}/{jobs}"],
                        stdout=said,
                        stderr=subprocess.STDOUT,
                        env={"OMP_NUM_THREADS": threads, **os.environ},
                    )
                )
        while any(job.poll() is None for job in started):
            time.sleep(LOOK)
            if len(ledger) != shown:
                shown = len(ledger)
                print(f"{shown:,} runs are finished", flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        running = [job for job in started if job.poll() is None]
        for job in running:
            job.terminate()
        for job in running:
            job.wait()
    status = 0
    for number, job in enumerate(started, start=1):
        if job.returncode:
            status = max(status, abs(job.returncode))
            lines = (folder / f"job-{number}.txt").read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            print(f"process {number} ended with status {job.returncode}: {last.rpartition(chr(13))[2]}", file=sys.stderr)
    return status


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def parse_share(text: str) -> tuple[int, int]:
    """`2/4`, the second of four shares, as (1, 4)."""
    first, slash, second = text.partition("/")
    if not (slash and first.isdigit() and second.isdigit() and 1 <= int(first) <= int(second)):
        raise ValueError(f"--share must be of the form 2/4, the second of four shares, got {text!r}")
    return int(first) - 1, int(second)
