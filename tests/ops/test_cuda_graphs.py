"""Which calls find their relevance built ahead; what a GPU does then is in the tests of the kernels."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

import rankgrad as rg
from rankgrad.ops import cuda_graphs
from rankgrad.ops.cuda_graphs import Capture, GraphCache, GraphProgram
from rankgrad.train.large_batch import LargeBatch


class Counted:
    """A graph that counts how often it was used."""

    def __init__(self):
        self.count = 0

    def replay(self):
        self.count += 1


class Used:
    """An event that lists what was done with it."""

    def __init__(self):
        self.used = []

    def __getattr__(self, name):
        return lambda: self.used.append(name)


def capture_of(labels):
    """A capture of a loss over `labels` without its graphs."""
    capture = object.__new__(Capture)
    capture.inputs, capture.leaf = (labels.clone(),), torch.zeros(len(labels), 2)
    capture.build_graph, capture.loss_graph, capture.known = Counted(), Counted(), Used()
    capture.most, capture._begun, capture.stream = torch.tensor([3]), [], torch.cuda.current_stream()
    capture.beside = Stream()
    return capture


class Stream:
    """A stream that lists those it waited for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


@pytest.fixture
def streams(monkeypatch):
    """Two streams; the last one is current."""
    found = [Stream(), Stream()]

    @contextmanager
    def entered(stream):
        found.append(stream)
        yield
        found.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return found


class OnCpu:
    """What a capture does, without a GPU: it runs once, and its gradient is made before what arrives is known."""

    def __init__(self, leaf, inputs, widths, program):
        self.widths, self.leaf = widths, leaf.detach().clone().requires_grad_()
        out, *self.others = program.loss(self.leaf, program.build(*inputs)[0], widths)
        (self.d_leaf,) = torch.autograd.grad(out, self.leaf)
        self.out = out.detach()

    def replay(self, leaf, inputs):
        assert leaf.dtype == self.leaf.dtype
        return [0]

    def gradient(self, grad_out):
        return self.d_leaf * grad_out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_loss_scale_saves_small_gradients_of_captured_calls(dtype, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "Capture", OnCpu)
    program = GraphProgram(
        (1,), lambda labels: (labels, torch.zeros(1, dtype=torch.long)), lambda leaf, *_: (leaf.double().sum() * 1e-9,)
    )
    cache, leaf = GraphCache(), torch.ones(3, dtype=dtype, requires_grad=True)
    for _ in range(3):  # as usual, captured, replayed
        found = cache.run("key", leaf, (torch.zeros(1),), program) or program.run(leaf, (torch.zeros(1),))
        (gradient,) = torch.autograd.grad(found[0] * 2.0**16, leaf)
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, torch.full((3,), 1e-9 * 2**16, dtype=dtype), rtol=1e-2, atol=0)
    assert sum(map(len, cache.free.values())) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_a_capture_is_free_after_its_backward_pass_though_the_loss_is_held(kept, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "Capture", OnCpu)
    program = GraphProgram((1,), lambda labels: (labels, torch.zeros(1, dtype=torch.long)), lambda leaf, *_: (leaf.sum(),))
    cache, leaf, total = GraphCache(), torch.ones(3, requires_grad=True), 0.0
    cache.run("key", leaf, (torch.zeros(1),), program)
    for _ in range(4):
        (loss,) = cache.run("key", leaf, (torch.zeros(1),), program)
        total = total + loss
        loss.backward(retain_graph=kept)
    assert sum(map(len, cache.free.values())) == (0 if kept else 1)
    if kept:
        loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_memory_that_captures_keep_is_limited(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "Capture", OnCpu)
    monkeypatch.setattr(cuda_graphs, "STALE", 10)
    leaves = {rows: torch.ones(rows, 4, requires_grad=True) for rows in (100, 101, 102)}
    # two of them are a twentieth of the memory
    one_of_them = cuda_graphs.held_bytes(leaves[100], row_bytes=50)
    monkeypatch.setattr(cuda_graphs, "memory_of", lambda device: 20 * 2.5 * one_of_them)
    program = GraphProgram(
        (1,), lambda labels: (labels, torch.zeros(1, dtype=torch.long)), lambda leaf, *_: (leaf.sum(),), row_bytes=50
    )
    cache = GraphCache()

    def call(rows):
        """Whether it ran captured."""
        found = cache.run("key", leaves[rows], (torch.zeros(1),), program)
        if found is not None:
            found[0].backward()
        return found is not None

    assert [call(rows) for rows in (100, 100, 101, 101)] == [False, True, False, True]
    assert [call(102) for _ in range(3)] == [False] * 3, "there is no room, and the others are in use"
    assert [call(rows) for rows in (100, 101)] == [True, True]
    assert all(call(101) for _ in range(cuda_graphs.STALE))
    assert call(102), "in the place of the first, which was not used for long"
    assert [call(rows) for rows in (101, 102, 100)] == [True, True, False]


def test_one_capture_has_room_however_small_the_gpu(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "Capture", OnCpu)
    monkeypatch.setattr(cuda_graphs, "memory_of", lambda device: 1.0)
    program = GraphProgram((1,), lambda labels: (labels, torch.zeros(1, dtype=torch.long)), lambda leaf, *_: (leaf.sum(),))
    cache, leaf = GraphCache(), torch.ones(5, 4, requires_grad=True)
    found = [cache.run("key", leaf, (torch.zeros(1),), program) for _ in range(3)]
    assert [outputs is not None for outputs in found] == [False, True, False], "the second is pending when the third comes"
    assert cuda_graphs.is_capturable(leaf)
    assert cuda_graphs.is_capturable(torch.empty(cuda_graphs.MOST_ROWS, 4))
    assert not cuda_graphs.is_capturable(torch.empty(cuda_graphs.MOST_ROWS + 1, 4))


def test_long_lists_of_two_lengths_have_room(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "Capture", OnCpu)
    monkeypatch.setattr(cuda_graphs, "memory_of", lambda device: 24 * 2.0**30)
    program = GraphProgram((1,), lambda mask: (mask, torch.zeros(1, dtype=torch.long)), lambda leaf, *_: (leaf.sum(),))
    cache = GraphCache()
    for length in (100_000, 1_000_000):
        scores, mask = torch.ones(length, requires_grad=True), torch.ones(length, dtype=torch.bool)
        assert cache.run("key", scores, (mask,), program) is None
        assert cache.run("key", scores, (mask,), program) is not None


def test_large_batches_are_captured_where_they_are_a_small_share_of_the_memory(monkeypatch):
    embeddings = torch.empty(65_536, 512)
    for gigabytes, expected in ((24, False), (40, False), (80, True)):
        monkeypatch.setattr(cuda_graphs, "memory_of", lambda device, gigabytes=gigabytes: gigabytes * 2.0**30)
        assert cuda_graphs.is_capturable(embeddings) == expected


@pytest.mark.usefixtures("streams")
def test_what_has_begun_is_not_built_again_and_only_once():
    labels = torch.arange(4)
    capture, embeddings = capture_of(torch.zeros(4, dtype=torch.long)), torch.randn(4, 2)
    capture.begin((labels,))
    assert capture.replay(embeddings, (labels.view(4),)) == [3]
    assert (capture.build_graph.count, capture.loss_graph.count) == (1, 1)
    assert torch.equal(capture.inputs[0], labels)
    assert torch.equal(capture.leaf, embeddings)
    assert capture.known.used == ["record", "wait", "synchronize"]  # it may have begun on another stream
    capture.replay(embeddings, (labels,))
    assert (capture.build_graph.count, capture.loss_graph.count) == (2, 2)
    assert capture.known.used[3:] == ["record", "synchronize"]


def test_a_call_on_another_stream_waits_for_the_last_one(streams):
    """Both use the same memory, and only the host knows that the last one was started."""
    labels, embeddings = torch.arange(4), torch.randn(4, 2)
    side, main = streams
    capture = capture_of(labels)
    capture.replay(embeddings, (labels,))
    assert not main.waited
    streams.reverse()
    capture.replay(embeddings, (labels,))
    capture.replay(embeddings, (labels,))
    assert (side.waited, main.waited) == ([main], [])
    streams.reverse()
    capture.begin((labels,))
    assert capture.beside.waited == [main, side], "for those who made the labels, and for the last call"
    capture.replay(embeddings, (labels,))
    assert (side.waited, main.waited) == ([main], [capture.beside])


def test_an_objective_without_a_hash_is_not_captured():
    @dataclass
    class MeanRank:
        scale: float = 1.0

        def __call__(self, ranks):
            return self.scale * ranks.mean(ranks.rank)

    cache, scores = GraphCache(), torch.randn(4, 2)
    config = rg.RankLoss(rg.Sigmoid(0.1), MeanRank()).config
    for key in (config, (config, "high")):
        assert cache.replay(key, scores, ()) is None
        assert cache.run(key, scores, (), program=None) is None
        assert cache.run(key, scores, (), program=None) is None


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("change", ["another tensor", "written to", "a part", "none begun"])
def test_other_labels_are_built(change):
    labels = torch.arange(8)
    capture = capture_of(torch.zeros(4, dtype=torch.long))
    given = labels[:4]
    if change != "none begun":
        capture.begin((given,))
    if change == "another tensor":
        given = given.clone()
    elif change == "written to":
        labels += 1
    elif change == "a part":
        given = labels[::2]
    before = capture.build_graph.count
    capture.replay(torch.randn(4, 2), (given,))
    assert capture.build_graph.count == before + 1
    assert torch.equal(capture.inputs[0], given)


@pytest.mark.usefixtures("streams")
def test_a_call_begins_with_the_capture_that_it_will_use():
    cache, labels = GraphCache(), torch.arange(4)
    wrong, right, in_front = (capture_of(torch.zeros(n, dtype=torch.long)) for n in (5, 4, 4))
    cache.free = {"a": [wrong], "b": [], "c": [in_front, right]}
    cache.begin((labels,))
    assert [capture.build_graph.count for capture in (wrong, in_front, right)] == [0, 0, 1]
    assert right.has_begun((labels,))
    cache.begin((torch.arange(9),))  # of which there is none


def test_large_batch_tells_the_labels_before_the_model_runs():
    said = []

    class Told(rg.FastAPLoss):
        def prepare_labels(self, labels):
            said.append(labels)

    class Model(torch.nn.Linear):
        def forward(self, images):
            said.append("model")
            return super().forward(images)

    labels = torch.arange(6) // 2
    LargeBatch(Model(3, 2), Told(), 0)(torch.randn(6, 3), labels)
    assert said[0] is labels
    assert said[1:] == ["model"]
    rg.FastAPLoss().prepare_labels(labels)  # on a CPU there is nothing to prepare


def test_the_gpu_of_the_tensors_is_current_in_a_call(monkeypatch):
    """Triton launches on the current GPU, and graphs are captured there, whatever GPU the tensors are on."""
    current = []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    class Watched(rg.AveragePrecision):
        def __call__(self, ranks):
            seen.append(current[-1])
            return super().__call__(ranks)

    seen = []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    loss, embeddings, labels = rg.RankLoss(rg.Exact(), Watched()), torch.randn(4, 2), torch.arange(4) // 2
    loss(embeddings, labels)
    loss.from_scores(embeddings, embeddings > 0)
    assert len(seen) == 2
    assert all(tensor is embeddings for tensor in seen)
    assert not current


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_loss_on_a_gpu_that_is_not_current():
    labels, batches = torch.arange(64) // 4, torch.randn(3, 64, 16)
    found = {device: [] for device in ("cuda:0", "cuda:1")}
    for device, gradients in found.items():
        loss = rg.RecallAtKLoss()
        for data in batches:  # as usual, captured, replayed
            embeddings = data.to(device).requires_grad_()
            loss.prepare_labels(on_device := labels.to(device))
            loss(embeddings, on_device).backward()
            gradients.append(embeddings.grad.cpu())
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(found["cuda:1"], found["cuda:0"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_call_that_was_begun_gives_the_same_bits_on_a_gpu():
    ahead, plain = rg.RecallAtKLoss(), rg.RecallAtKLoss()
    for seed in range(6):
        torch.manual_seed(seed)
        labels = torch.randint(0, 40, (256,), device="cuda")
        data = torch.randn(256, 64, device="cuda")
        values, gradients = [], []
        for loss in (ahead, plain):
            embeddings = data.clone().requires_grad_()
            if loss is ahead and seed != 4:
                loss.prepare_labels(labels if seed != 3 else labels.flip(0))  # of another call: built again
            value = loss(embeddings, labels)
            value.backward()
            values.append(value.detach())
            gradients.append(embeddings.grad)
        assert torch.equal(*values)
        assert torch.equal(*gradients)
