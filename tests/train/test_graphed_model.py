"""Passes over chunks are recorded where that is safe, and replays give the gradients of the plain passes."""

import copy
import gc
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from train.tiny_loop import Vectors, network

import rankgrad as rg
from rankgrad.train import train_step
from rankgrad.train.errors import TrainingError
from rankgrad.train.graphed_model import GraphedModel
from rankgrad.train.large_batch import LargeBatch
from rankgrad.train.loop import fit
from rankgrad.train.settings import TrainSettings
from rankgrad.train.train_step import TrainStep

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROUNDING = 2e-2  # of 16 bits; convolutions may take other algorithms while they are recorded
STREAMS = "The AccumulateGrad node's stream does not match the stream of the node that produced the incoming gradient."


class FakeRecorder:
    """A recorder without a GPU: a replay calls the function again, and is counted."""

    replays = 0
    modes: ClassVar[list[str]] = []
    errors: ClassVar[list[Exception]] = []
    warning = STREAMS

    def __init__(self, device, mode):
        FakeRecorder.modes.append(mode)

    def warm_up(self, call):
        for _ in range(3):
            call()

    def record(self, call):
        assert not gc.isenabled()
        assert not torch.is_autocast_enabled("cpu")
        warnings.warn(self.warning, stacklevel=2)
        if FakeRecorder.errors:
            raise FakeRecorder.errors.pop(0)
        call()

        def replay():
            FakeRecorder.replays += 1
            call()

        return replay


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(FakeRecorder, "replays", 0)
    monkeypatch.setattr(FakeRecorder, "modes", [])
    monkeypatch.setattr(FakeRecorder, "errors", [])
    return FakeRecorder


class Network(nn.Module):
    """Takes images of any type, draws twice, counts its passes; one layer is never used."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4), *layers)
        self.unused = nn.Linear(2, 2)
        self.passes = 0

    def forward(self, images):
        self.passes += 1
        return self.layers(images.float())


def problem(items=22):
    torch.manual_seed(0)
    return Network().train(), torch.randn(items, 6), torch.randint(5, (items,))


def large(model, keep, chunk_size=4):
    return LargeBatch(model, rg.FastAPLoss(), chunk_size, keep)


def graphs_of(model, autocast=None):
    return GraphedModel(model, autocast, FakeRecorder)


def gradients_of_step(step, images, labels, seed=3):
    for parameter in step.model.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    loss = step(images, labels)
    return loss, {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("keep", [0, 2, 5, 99])
def test_gradients_are_those_of_the_plain_passes(recorder, keep):
    model, images, labels = problem()
    expected_loss, expected = gradients_of_step(large(model, keep), images, labels)
    step = large(model, keep)
    assert step.record(graphs_of(model), images, labels) is None
    for _ in range(2):
        passes = model.passes
        recorder.replays = 0
        loss, found = gradients_of_step(step, images, labels)
        assert torch.equal(loss, expected_loss)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
        # five chunks of 4 are recorded; the last one has 2 images
        kept = min(keep, 5)
        assert recorder.replays == 2 * 5
        repeated = 2 if keep < 6 else 1
        assert model.passes - passes == kept + 2 * (5 - kept) + repeated


@pytest.mark.parametrize(("keep", "chunk_size"), [(2, 4), (1, 0)])
def test_gradients_are_added_to_those_that_are_there(recorder, keep, chunk_size):
    model, images, labels = problem(20)
    step = large(model, keep, chunk_size)
    step.record(graphs_of(model), images, labels)
    batches = images, images.flip(0) + 1
    parts = [gradients_of_step(step, batch, labels)[1] for batch in batches]
    gradients_of_step(step, batches[0], labels)
    torch.manual_seed(3)
    step(batches[1], labels)
    for name, parameter in model.named_parameters():
        if name in parts[0]:
            torch.testing.assert_close(parameter.grad, parts[0][name] + parts[1][name])


@pytest.mark.parametrize(("keep", "chunk_size"), [(2, 4), (1, 0)])
def test_a_batch_without_graphs_gets_no_gradients_of_the_one_before(recorder, keep, chunk_size):
    """The last batch of an epoch may be smaller than the others."""
    model, images, labels = problem(20)
    step = large(model, keep, chunk_size)
    _, expected = gradients_of_step(step, images[:3], labels[:3])
    step.record(graphs_of(model), images, labels)
    gradients_of_step(step, images, labels)
    _, found = gradients_of_step(step, images[:3], labels[:3])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


class SharedMemory(FakeRecorder):
    """Graphs of one pool share memory: a forward pass overwrites the gradients that the last backward pass has written."""

    graphs: GraphedModel

    def record(self, call):
        replay = super().record(call)

        def overwriting():
            for total in self.graphs._sums:
                if total is not None:
                    total.fill_(torch.nan)
            replay()

        return overwriting


def test_gradients_that_are_added_to_outlast_the_memory_of_the_graphs(recorder):
    model, images, labels = problem(20)
    step = large(model, 1, chunk_size=0)
    SharedMemory.graphs = GraphedModel(model, None, SharedMemory)
    step.record(SharedMemory.graphs, images, labels)
    _, once = gradients_of_step(step, images, labels)
    torch.manual_seed(3)
    step(images, labels)
    for name, value in once.items():
        torch.testing.assert_close(model.get_parameter(name).grad, 2 * value)


def test_a_batch_with_more_chunks_than_were_recorded(recorder):
    model, images, labels = problem(20)
    step = large(model, 99)
    _, expected = gradients_of_step(step, images, labels)
    step.record(graphs_of(model), images[:6], labels[:6])
    _, found = gradients_of_step(step, images, labels)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    assert recorder.replays == 2


class Shifts(nn.Module):
    """Two parameters get the very gradient of the output, and a third one with other strides."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.ones(6, 4))
        self.turned = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, images):
        return images + self.first + self.second + self.turned


def test_what_the_graph_of_a_whole_batch_writes_can_be_changed_in_place(recorder):
    model, images, labels = Shifts().train(), torch.randn(6, 4), torch.arange(6) // 2
    step = large(model, "auto", chunk_size=0)
    _, expected = gradients_of_step(step, images, labels)
    assert step.record(graphs_of(model), images, labels) is None
    gradients_of_step(step, images, labels)
    assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.grad *= 2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * expected[name])


def test_a_whole_batch_is_one_kept_chunk(recorder):
    model, images, labels = problem()
    step = large(model, "auto", chunk_size=0)
    graphs = graphs_of(model)
    assert step.record(graphs, images, labels) is None
    assert graphs.num_kept == 1
    gradients_of_step(step, images, labels)
    assert recorder.replays == 2


def test_a_replay_sees_the_weights_of_its_step(recorder):
    model, images, labels = problem(20)
    plain = copy.deepcopy(model)
    steps = [large(model, 3), large(plain, 3)]
    steps[0].record(graphs_of(model), images, labels)
    optimizers = [torch.optim.Adam(step.model.parameters(), lr=0.1) for step in steps]
    for seed in range(4):
        found = [gradients_of_step(step, images, labels, seed)[1] for step in steps]
        for name in found[0]:
            torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()


def test_what_is_recorded_reads_memory_of_its_own(recorder):
    model, images, _ = problem(4)
    graphs = graphs_of(model)
    graphs.record(images, kept=1, others=True)
    for each in (*graphs._kept, graphs._embed, graphs._repeat):
        assert torch.equal(each.images, images)
        assert each.images.data_ptr() != images.data_ptr()


def test_other_batches_and_modes_run_as_usual(recorder):
    model, images, labels = problem(20)
    step = large(model, 1)
    step.record(graphs_of(model), images, labels)
    gradients_of_step(step, images.double(), labels)
    gradients_of_step(step, images[:3], labels[:3])
    model.eval()
    gradients_of_step(step, images, labels)
    assert recorder.replays == 0
    model.train()
    gradients_of_step(step, images, labels)
    assert recorder.replays > 0


def test_passes_of_the_recording_leave_no_trace_in_statistics(recorder):
    model = Network(nn.BatchNorm1d(4)).train()
    before = copy.deepcopy(model.state_dict())
    graphs = graphs_of(model)
    assert graphs.record(torch.randn(4, 6), kept=1, others=False) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_recording_is_tried_twice_and_the_reason_is_told_in_one_line(recorder, kind):
    model, images, labels = problem(20)
    error = kind("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")
    step = large(model, 1)
    FakeRecorder.errors = [error]
    assert step.record(graphs_of(model), images, labels) is None
    assert recorder.modes == ["thread_local", "relaxed"]
    FakeRecorder.errors = [error, error]
    assert step.record(graphs_of(model), images, labels) == "operation not permitted when stream is capturing"
    recorder.replays = 0
    gradients_of_step(step, images, labels)
    assert recorder.replays == 0
    assert gc.isenabled()


def test_the_reason_is_the_first_error_of_a_capture(recorder):
    """Ending a capture that has failed fails too."""
    model, images, labels = problem(20)
    errors = []
    for _ in range(2):
        error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
        error.__context__ = RuntimeError("a layer synchronises")
        errors.append(error)
    FakeRecorder.errors = errors
    assert large(model, 1).record(graphs_of(model), images, labels) == "a layer synchronises"


def test_a_shorter_last_chunk_has_no_graphs(recorder):
    model, images, labels = problem(22)
    graphs = graphs_of(model)
    assert large(model, 99).record(graphs, images, labels) is None
    assert graphs.num_kept == 5
    assert graphs._embed is None


def test_too_little_memory_keeps_fewer_chunks(recorder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model, images, labels = problem(20)
    step, graphs = large(model, 5), graphs_of(model)
    FakeRecorder.errors = [torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError("no memory")]
    assert step.record(graphs, images, labels) is None
    assert graphs.num_kept == 1, "5, then 2, then 1"
    FakeRecorder.errors = [torch.OutOfMemoryError("no memory")] * 9
    assert large(model, 5).record(graphs_of(model), images, labels) == "no memory"
    FakeRecorder.errors = []


def test_a_model_with_hooks_is_not_recorded(recorder):
    model, images, labels = problem(20)
    model.register_forward_hook(lambda module, args, output: None)
    assert "hooks" in large(model, 1).record(graphs_of(model), images, labels)
    assert recorder.modes == []


def test_running_eagerly_again(recorder):
    model, images, labels = problem(20)
    step = large(model, 1)
    step.record(graphs_of(model), images, labels)
    assert step.run_eagerly()
    assert not step.run_eagerly()
    gradients_of_step(step, images, labels)
    assert recorder.replays == 0


@pytest.mark.parametrize("errors", [0, 2])
def test_a_step_is_recorded_before_the_second_one_and_a_failure_is_told_with_its_reason(recorder, monkeypatch, errors):
    monkeypatch.setattr(train_step, "GraphedModel", partial(GraphedModel, make_recorder=FakeRecorder))
    FakeRecorder.errors = [RuntimeError("a layer synchronises\nand more")] * errors
    model, said, replays = network(), [], []
    batches = list(Vectors().iterate(0))
    step = TrainStep(model, rg.FastAPLoss(), TrainSettings(steps=3), None, steps_per_epoch=5, device=torch.device("cpu"))
    step._use_graphs = True
    step.train()
    for i, indices, images, labels in batches[:3]:
        step(i, i, indices, images, labels, warn=said.append)
        replays.append(recorder.replays)
    assert replays == ([0, 0, 0] if errors else [0, 2, 4])
    reason = "the model could not be recorded as CUDA graphs and runs layer by layer: a layer synchronises"
    assert said == ([reason] if errors else [])
    step.release()


def test_releasing_drops_the_graphs_of_model_and_loss(recorder):
    cleared = []

    class Loss(nn.Module):
        def forward(self, embeddings, labels):
            return embeddings.square().mean()

        def clear_graphs(self):
            cleared.append(self)

    model, images, labels = problem(20)
    step = TrainStep(model, Loss(), TrainSettings(steps=3), None, steps_per_epoch=5, device=torch.device("cpu"))
    step._large.record(graphs_of(model), images, labels)
    step.release()
    assert len(cleared) == 1
    recorder.replays = 0
    gradients_of_step(step._large, images, labels)
    assert recorder.replays == 0


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_finished_run_releases_what_it_recorded(tmp_path, monkeypatch, ends):
    released = []
    monkeypatch.setattr(TrainStep, "release", lambda step: released.append(step.model))
    model, settings = network(), TrainSettings(steps=3)
    if ends == "well":
        fit(model, rg.RecallAtKLoss(), Vectors(), settings, tmp_path, device="cpu")
    else:
        with pytest.raises(TrainingError, match="loss is nan"):
            fit(model, lambda x, labels: x.sum() * torch.nan, Vectors(), settings, tmp_path, device="cpu")
    assert released == [model]


def test_casts_of_weights_are_made_inside_what_is_recorded(recorder):
    model, images, labels = problem(20)
    seen = []
    model.layers[0].register_forward_hook(
        lambda module, args, output: seen.append((output.dtype, torch.is_autocast_cache_enabled()))
    )
    step = LargeBatch(model, rg.FastAPLoss(), 4, 2, autocast=torch.bfloat16)
    assert step.record(graphs_of(model, torch.bfloat16), images, labels) is None
    assert set(seen) == {(torch.bfloat16, False)}


def test_other_warnings_of_recording_are_heard(recorder, monkeypatch):
    monkeypatch.setattr(FakeRecorder, "warning", "The CUDA Graph is empty")
    model, images, labels = problem(20)
    with pytest.warns(UserWarning, match="Graph is empty"):
        large(model, 1).record(graphs_of(model), images, labels)


class Convolutions(nn.Module):
    """Counts the passes that go through its layers; one of these is never used."""

    live = False

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head, self.unused = nn.Linear(8, 4), nn.Linear(2, 2)
        self.passes = 0

    def train(self, mode=True):
        super().train(mode)
        self.trunk[1].train(mode and self.live)
        return self

    def forward(self, images):
        self.passes += 1
        return self.head(self.trunk(images).mean((2, 3)))


def differences(found, wanted):
    assert found.keys() == wanted.keys()
    return [float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted]


def square(embeddings, labels):
    return embeddings.float().square().mean()


def two_alike(make):
    torch.manual_seed(0)
    model = make().cuda().train()
    return model, copy.deepcopy(model)


@needs_gpu
@pytest.mark.parametrize("keep", [0, 2, 4])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_on_a_gpu_replays_give_the_gradients_of_the_plain_passes(autocast, keep):
    model, plain = two_alike(Convolutions)
    steps = [LargeBatch(each, square, 4, keep, autocast) for each in (model, plain)]
    labels = torch.zeros(16, dtype=torch.long, device="cuda")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for i in range(6):
        images = torch.randn(16, 3, 12, 12, device="cuda") + i
        if i == 1:
            assert steps[0].record(GraphedModel(model, autocast), images, labels) is None
        passes = model.passes
        found, wanted = (gradients_of_step(step, images, labels)[1] for step in steps)
        assert (model.passes == passes) == (i >= 1), "no layer is run from Python"
        assert max(differences(found, wanted)) < ROUNDING
        for optimizer in optimizers:
            optimizer.step()


class Drawing(Convolutions):
    def __init__(self):
        super().__init__()
        self.trunk.append(nn.Dropout(0.5))


@needs_gpu
@pytest.mark.parametrize("keep", [0, 2])
def test_on_a_gpu_random_layers_draw_the_same_in_both_passes(keep):
    model, _ = two_alike(Drawing)
    labels = torch.zeros(16, dtype=torch.long, device="cuda")
    images = torch.randn(16, 3, 12, 12, device="cuda")
    step = LargeBatch(model, square, 4, keep)
    _, wanted = gradients_of_step(step, images, labels)
    assert step.record(GraphedModel(model, None), images, labels) is None
    found = [gradients_of_step(step, images, labels, seed)[1] for seed in (3, 3, 4)]
    assert max(differences(found[0], found[1])) < 1e-5
    assert max(differences(found[0], wanted)) < ROUNDING
    assert max(differences(found[2], wanted)) > ROUNDING


class Live(Convolutions):
    """Its batch norm takes the statistics of the batch and remembers them."""

    live = True


@needs_gpu
def test_on_a_gpu_live_batch_norm_counts_every_step_once():
    model, plain = two_alike(Live)
    steps = [LargeBatch(each, square, 0) for each in (model, plain)]
    labels = torch.zeros(16, dtype=torch.long, device="cuda")
    for i in range(5):
        images = torch.randn(16, 3, 12, 12, device="cuda") + i
        if i == 1:
            assert steps[0].record(GraphedModel(model, None), images, labels) is None
        found, wanted = (gradients_of_step(step, images, labels)[1] for step in steps)
        assert max(differences(found, wanted)) < ROUNDING
    assert int(model.trunk[1].num_batches_tracked) == 5
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(model.trunk[1], name), getattr(plain.trunk[1], name), rtol=1e-3, atol=1e-3)


class Waiting(nn.Module):
    """Reads a number in the middle of its pass, and draws."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 64), nn.Dropout(0.5)

    def forward(self, images):
        y = self.dropout(self.layer(images))
        return y / y.detach().abs().max().item()


@needs_gpu
def test_on_a_gpu_a_model_that_synchronises_goes_on_without_graphs():
    model, plain = two_alike(Waiting)
    steps = [LargeBatch(each, square, 0) for each in (model, plain)]
    images, labels = torch.randn(16, 3, device="cuda"), torch.zeros(16, dtype=torch.long, device="cuda")
    reason = steps[0].record(GraphedModel(model, None), images, labels)
    assert reason
    assert "\n" not in reason
    found, wanted = (gradients_of_step(step, images, labels)[1] for step in steps)
    assert max(differences(found, wanted)) < ROUNDING


@needs_gpu
def test_on_a_gpu_another_thread_may_pin_memory_during_a_capture():
    model, _ = two_alike(Convolutions)
    images, labels = torch.randn(16, 3, 12, 12, device="cuda"), torch.zeros(16, dtype=torch.long, device="cuda")
    stop = threading.Event()

    def load():
        size = 2**20
        while not stop.is_set():
            size += 2**18  # a size that the allocator does not have
            torch.empty(size % 2**26, dtype=torch.uint8).pin_memory().to("cuda", non_blocking=True)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(5):
            graphs = GraphedModel(model, torch.bfloat16)
            step = LargeBatch(model, square, 4, 2, torch.bfloat16)
            assert step.record(graphs, images, labels) is None
            assert graphs.num_kept == 2
    finally:
        stop.set()
        thread.join()


FIRST_RUN = Path(__file__).with_name("first_run.py")


@needs_gpu
@pytest.mark.parametrize(("size", "chunk_size"), [(112, 0), (160, 0), (224, 100)])
def test_on_a_gpu_the_first_run_of_a_process_records_lite0_and_runs_leave_no_memory(size, chunk_size):
    """Twelve runs one after the other: no warning in any, and as much memory after the last as after the first."""
    pytest.importorskip("timm")
    command = [sys.executable, str(FIRST_RUN), str(size), str(chunk_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
