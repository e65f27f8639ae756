"""The pass over a batch is recorded where that is safe, and replays give the gradients of the plain pass."""

import copy
import warnings

import pytest
import torch
from torch import nn
from train.tiny_loop import Vectors, network

import rankgrad as rg
from rankgrad.train.errors import TrainingError
from rankgrad.train.graphed_model import GraphedModel
from rankgrad.train.loop import fit
from rankgrad.train.settings import TrainSettings
from rankgrad.train.train_step import TrainStep

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROUNDING = 2e-2  # of 16 bits; convolutions may take other algorithms while they are recorded
STREAMS = "The AccumulateGrad node's stream does not match the stream of the node that produced the incoming gradient."


class OnGPU(torch.Tensor):
    """Says so."""

    is_cuda = True


class Recorder:
    """`torch.cuda.make_graphed_callables` without a GPU: a replay is the plain pass, and is counted."""

    def __init__(self):
        self.samples, self.regions, self.replays, self.trouble, self.warning = [], [], 0, None, STREAMS
        self.with_gradients = []
        self.passes = 0  # before anything is recorded

    def __call__(self, model, sample_args, *, allow_unused_input):
        plain = model.forward
        for _ in range(self.passes):
            plain(*sample_args)

        def forward(batch):
            self.replays += 1
            return plain(batch)

        model.forward = forward
        warnings.warn(self.warning, stacklevel=2)
        if self.trouble is not None:
            raise self.trouble
        self.samples += sample_args
        self.with_gradients.append(torch.is_grad_enabled())
        enabled = torch.is_autocast_enabled("cuda")
        self.regions.append((torch.get_autocast_dtype("cuda") if enabled else None, torch.is_autocast_cache_enabled()))
        return model


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", recorder)
    return recorder


class Network(nn.Module):
    """Takes images of any type."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2), *layers)

    def forward(self, images):
        return self.layers(images.float())


def on_gpu(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype).as_subclass(OnGPU)


def after_two_steps(model, images=None):
    graphed = GraphedModel(model, None)
    said = [graphed.before_step(on_gpu(4, 3) if images is None else images, whole=True) for _ in range(2)]
    assert said == [None, None]
    return graphed


def test_the_second_step_is_recorded_and_no_other(recorder):
    graphed = GraphedModel(Network(), None)
    recorded = []
    for _ in range(4):
        assert graphed.before_step(on_gpu(4, 3), whole=True) is None
        graphed.model(on_gpu(4, 3))
        recorded.append((len(recorder.samples), recorder.replays))
    assert recorded == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_what_is_recorded_reads_memory_of_its_own(recorder):
    images = on_gpu(4, 3)
    after_two_steps(Network(), images)
    assert torch.equal(recorder.samples[0], images)
    assert recorder.samples[0].data_ptr() != images.data_ptr()


@pytest.mark.parametrize(
    ("images", "whole"),
    [(on_gpu(4, 3), False), ((on_gpu(4, 3),), True), ({"images": on_gpu(4, 3)}, True), (torch.ones(4, 3), True)],
    ids=["in chunks", "tuple", "dict", "on the CPU"],
)
def test_other_batches_are_not_recorded(recorder, images, whole):
    model = Network()
    graphed = GraphedModel(model, None)
    assert [graphed.before_step(images, whole=whole) for _ in range(3)] == [None] * 3
    assert not recorder.samples
    assert "forward" not in vars(model)


def test_passes_of_the_recording_leave_no_trace_in_statistics(recorder):
    norm = nn.BatchNorm1d(2)
    before = copy.deepcopy(norm.state_dict())
    recorder.passes = 3
    after_two_steps(Network(norm))
    assert len(recorder.samples) == 1
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_trouble_is_told_in_one_line_and_the_network_runs_as_usual(recorder, monkeypatch, kind):
    forgotten = []
    monkeypatch.setattr("rankgrad.train.graphed_model.forget_failed_capture", forgotten.append)
    model, images = Network(), on_gpu(4, 3)
    model.register_buffer("anchor", torch.ones(2, requires_grad=True))  # which torch refuses to record
    recorder.trouble = kind("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")
    graphed = GraphedModel(model, None)
    said = [graphed.before_step(images, whole=True) for _ in range(3)]
    assert said == [None, "operation not permitted when stream is capturing", None]
    assert forgotten == [images.device]
    assert model(images).shape == (4, 2)
    assert recorder.replays == 0


@pytest.mark.parametrize(
    "batch",
    [on_gpu(5, 3), on_gpu(4, 1, 3), on_gpu(4, 3, dtype=torch.uint8), torch.ones(4, 3)],
    ids=["longer", "deeper", "bytes", "on the CPU"],
)
def test_batches_unlike_the_recorded_one_are_not_replayed(recorder, batch):
    model = Network()
    after_two_steps(model)
    assert model(batch).shape == (*batch.shape[:-1], 2)
    assert recorder.replays == 0
    model(on_gpu(4, 3))
    assert recorder.replays == 1


def test_only_training_passes_are_replayed(recorder):
    model = Network()
    after_two_steps(model)
    with torch.no_grad():
        model(on_gpu(4, 3))
    model.eval()(on_gpu(4, 3))
    assert recorder.replays == 0
    model.train()(on_gpu(4, 3))
    assert recorder.replays == 1


def test_giving_up_brings_the_plain_pass_back(recorder):
    model = Network()
    graphed = after_two_steps(model)
    graphed.release()
    assert model(on_gpu(4, 3)).shape == (4, 2)
    assert recorder.replays == 0
    assert "forward" not in vars(model)
    graphed.release()  # as a second lack of memory does


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_training_leaves_the_model_as_it_was_handed_in(tmp_path, monkeypatch, ends):
    released = []
    monkeypatch.setattr(TrainStep, "release", lambda stepper: released.append(stepper.model))
    model, settings = network(), TrainSettings(steps=3)
    if ends == "well":
        fit(model, rg.RecallAtKLoss(), Vectors(), settings, tmp_path, device="cpu")
    else:
        with pytest.raises(TrainingError, match="loss is nan"):
            fit(model, lambda x, labels: x.sum() * torch.nan, Vectors(), settings, tmp_path, device="cpu")
    assert released == [model]


def test_giving_up_leaves_a_pass_that_was_there_before(recorder):
    model = Network()
    own = model.forward = lambda images: images.sum()
    after_two_steps(model).release()
    assert model.forward is own


def test_gradients_are_recorded_also_where_they_are_off(recorder):
    with torch.no_grad():
        after_two_steps(Network())
    assert recorder.with_gradients == [True]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_casts_of_weights_are_made_anew_in_what_is_recorded(recorder, monkeypatch, autocast):
    # autocast has no CUDA region where there is no GPU
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    graphed = GraphedModel(Network(), autocast)
    for _ in range(2):
        graphed.before_step(on_gpu(4, 3), whole=True)
    assert recorder.regions == [(autocast, False)]
    assert torch.is_autocast_cache_enabled()


def test_other_warnings_of_recording_are_heard(recorder):
    recorder.warning = "The CUDA Graph is empty"
    with pytest.warns(UserWarning, match="Graph is empty"):
        after_two_steps(Network())


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


def gradients(model, images, autocast=None):
    """Copies: those of a replay are in memory that the next one overwrites."""
    model.zero_grad()
    with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
        embeddings = model(images)
    assert embeddings.dtype == (autocast or torch.float32)
    embeddings.float().square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def differences(found, wanted):
    assert found.keys() == wanted.keys()
    return [float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted]


def two_alike(network):
    torch.manual_seed(0)
    model = network().cuda().train()
    return model, copy.deepcopy(model)


@needs_gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_replayed_gradients_are_those_of_the_plain_pass(autocast):
    model, plain = two_alike(Convolutions)
    graphed = GraphedModel(model, autocast)
    for step in range(5):
        images = torch.randn(16, 3, 12, 12, device="cuda") + step
        assert graphed.before_step(images, whole=True) is None
        passes = model.passes
        found = gradients(model, images, autocast)
        assert model.passes == passes + (step == 0), "from the second step on, no layer is run from Python"
        assert max(differences(found, gradients(plain, images, autocast))) < ROUNDING


@needs_gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_replay_sees_the_weights_of_its_step(autocast):
    model, plain = two_alike(Convolutions)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, plain)]
    graphed = GraphedModel(model, autocast)
    images = torch.randn(16, 3, 12, 12, device="cuda") + 1
    seen = []
    for _ in range(5):
        assert graphed.before_step(images, whole=True) is None
        seen.append(gradients(model, images, autocast))
        assert max(differences(seen[-1], gradients(plain, images, autocast))) < ROUNDING
        for optimizer in optimizers:
            optimizer.step()
    # the weights that were recorded, those of the second step, would have given these
    assert min(differences(seen[-1], seen[1])) > 2 * ROUNDING


class Live(Convolutions):
    """Its batch norm takes the statistics of the batch and remembers them."""

    live = True


@needs_gpu
def test_live_batch_norm_counts_every_step_once():
    model, plain = two_alike(Live)
    graphed = GraphedModel(model, None)
    for step in range(5):
        images = torch.randn(16, 3, 12, 12, device="cuda") + step
        assert graphed.before_step(images, whole=True) is None
        assert max(differences(gradients(model, images), gradients(plain, images))) < ROUNDING
    assert int(model.trunk[1].num_batches_tracked) == 5
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(model.trunk[1], name), getattr(plain.trunk[1], name), rtol=1e-3, atol=1e-3)


class Waiting(nn.Module):
    """Asks for a number in the middle of its pass, and draws."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 64), nn.Dropout(0.5)

    def forward(self, images):
        y = self.dropout(self.layer(images))
        return y / y.detach().abs().max().item()


@needs_gpu
def test_a_network_that_waits_for_the_device_goes_on_without_graphs():
    model, plain = two_alike(Waiting)
    graphed = GraphedModel(model, None)
    images = torch.randn(16, 3, device="cuda")
    said = []
    for step in range(3):
        said.append(graphed.before_step(images, whole=True))
        torch.manual_seed(step)
        found = gradients(model, images)
        torch.manual_seed(step)
        assert max(differences(found, gradients(plain, images))) < ROUNDING
    assert said[0] is said[2] is None
    assert said[1]
    assert "\n" not in said[1]
