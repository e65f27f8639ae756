"""The loss is called ahead of the first step, beside the preparation of the first batch, and never during a step."""

import subprocess
import sys
import threading

import pytest
import torch

import rankgrad
from rankgrad.runs.warm_up import BatchesAfter, InBackground, warm_up


class ThreeBatches:
    item_names = ("a", "b")

    def __init__(self, done):
        self.done, self.epoch = done, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 3

    def iterate(self, start):
        for step in range(start, 3):
            self.done.append(f"batch {step}")
            yield step, torch.zeros(1), torch.zeros(1), torch.zeros(1)


def test_the_first_batch_is_prepared_meanwhile_and_handed_out_after():
    done, prepared = [], threading.Event()

    def compile_kernels():
        assert prepared.wait(timeout=20)
        done.append("warm")

    batches = BatchesAfter(ThreeBatches(done), InBackground(compile_kernels).wait)
    batches.set_epoch(4)
    assert (batches.batches.epoch, len(batches), batches.item_names) == (4, 3, ("a", "b"))

    original = batches.batches.iterate

    def iterate(start):
        for batch in original(start):
            prepared.set()
            yield batch

    batches.batches.iterate = iterate
    steps = []
    for batch in batches.iterate(1):
        done.append(f"step {batch[0]}")
        steps.append(batch[0])
    assert steps == [1, 2]
    assert done == ["batch 1", "warm", "step 1", "batch 2", "step 2"]


def test_an_error_is_left_to_the_step_that_will_meet_it_again():
    def fail():
        raise RuntimeError("out of memory")

    InBackground(fail).wait()


def test_a_process_that_ends_early_waits_for_the_thread():
    code = (
        "import time, sys; from rankgrad.runs.warm_up import InBackground\n"
        "InBackground(lambda: (time.sleep(0.3), print('compiled', flush=True)))\n"
        "sys.exit('bad settings')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "compiled\n", "bad settings\n")


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_loss_is_called_as_in_training_without_touching_its_random_numbers(autocast):
    calls = []

    class Recorded(rankgrad.SmoothAPLoss):
        def forward(self, embeddings, labels):
            calls.append((tuple(embeddings.shape), labels.bincount().tolist(), torch.is_autocast_enabled("cpu")))
            return super().forward(embeddings, labels)

    state = torch.get_rng_state()
    warm_up(Recorded(), 12, 4, 8, torch.device("cpu"), autocast)
    assert calls == [((12, 8), [4, 4, 4], autocast is not None)]
    assert torch.equal(torch.get_rng_state(), state)
