"""The kernels of a loss are compiled at the same time before its first call, by a dry run in which none is run."""

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rankgrad as rg
from rankgrad._dry_run import dry_run, launch_instead
from rankgrad.ops import functional

triton = pytest.importorskip("triton")
first_call = pytest.importorskip("rankgrad.ops.triton.first_call")

# the poison of fresh memory comes with torch's deterministic mode, which remarks on operators of a GPU that are not
pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMALIZE = {"normalize_kernel", "normalize_bwd_kernel"}
EMBEDDINGS = NORMALIZE | {"operand_kernel", "positives_kernel", "gather_kernel"}
FEW = {"count_kernel", "backward_kernel"}
MANY = {"scatter_kernel", "store_kernel", "gradient_kernel"}
AMONG = {"among_kernel", "among_bwd_kernel", "weigh_kernel"}
RECALL = AMONG | {"recall_kernel"}
GRIDS = {"grid_kernel", "moment_kernel", "collect_kernel", "table_kernel"}
BLACKBOX = {"proper_kernel", "perturb_kernel"}
SCORES = {"table_kernel", "count_kernel", "backward_kernel", "positive_grad_kernel"} | BLACKBOX


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh memory holds NaN and the largest integers: an index taken from what no kernel has written is out of bounds."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(before)


def batch(per_class):
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(128, 24, generator=generator).to(DEVICE).requires_grad_()
    return embeddings, torch.arange(128, device=DEVICE) // per_class


def launches(call):
    names = []
    with dry_run(lambda kernel, grid, arguments: names.append(kernel.__name__)):
        call()
    return names


@pytest.mark.parametrize(
    ("loss", "per_class", "of_ranker"),
    [
        (rg.RecallAtKLoss(), 4, FEW | RECALL),
        (rg.SmoothAPLoss(), 64, MANY | GRIDS | AMONG),
        (rg.FastAPLoss(), 4, FEW),
        (rg.RamboAPLoss(), 4, FEW | BLACKBOX),
        (rg.RamboAPLoss(), 64, MANY | BLACKBOX | {"table_kernel"}),
        (rg.RankLoss(rg.UpperBound(0.1, 3.0, 0.2), rg.NDCG()), 4, FEW | {"proper_kernel"}),
    ],
)
@pytest.mark.parametrize("precision", ["fast", "high"])
def test_a_dry_run_knows_the_launches_of_both_passes_and_runs_none(loss, per_class, of_ranker, precision):
    embeddings, labels = batch(per_class)
    # a captured call puts its batch in order by kernels of its own
    loss.backend, loss.precision, loss.cuda_graphs = "triton", precision, False
    expected = EMBEDDINGS | of_ranker
    assert set(launches(lambda: loss(embeddings, labels))) == expected
    assert launch_instead() is None
    with torch.no_grad():
        only_forward = set(launches(lambda: loss(embeddings, labels)))
    assert only_forward < expected
    assert not only_forward & {"backward_kernel", "gradient_kernel", "gather_kernel"}


def test_every_kernel_that_is_launched_can_be_tried():
    folder = Path(first_call.__file__).parent
    assert len(re.findall(r"^@kernel\(", "".join(path.read_text() for path in folder.glob("*.py")), re.MULTILINE)) > 20
    for path in folder.glob("*.py"):
        found = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w*kernel)\(", path.read_text(), re.MULTILINE)
        assert not found, f"{path.name}: {found} are launched: decorate them with @kernel() in place of @triton.jit"


def test_a_dry_run_of_score_lists():
    scores = torch.randn(2, 300, device=DEVICE, requires_grad=True)
    relevance = torch.arange(300, device=DEVICE).expand(2, -1) % 7 == 0
    # what a captured call reads between its two steps is no part of a dry run
    loss = rg.RamboAPLoss(backend="triton", cuda_graphs=False)
    assert set(launches(lambda: loss.from_scores(scores, relevance))) == SCORES


def test_other_threads_launch_meanwhile():
    seen = []
    with dry_run(lambda *launch: None):
        thread = threading.Thread(target=lambda: seen.append(launch_instead()))
        thread.start()
        thread.join()
        assert launch_instead() is not None
    assert seen == [None]


def test_the_objective_of_the_user_does_not_see_a_dry_run(gpu):
    seen = []

    def objective(ranks):
        seen.append(bool(ranks.rank.isfinite().all()))
        return ranks.mean(1 / ranks.rank)

    embeddings, labels = batch(4)
    loss = rg.RankLoss(rg.Sigmoid(0.05), objective, backend="triton", cuda_graphs=False)
    value = loss(embeddings, labels)
    assert gpu.names.count("operand_kernel") == 1
    assert seen == [True]
    expected = rg.RankLoss(rg.Sigmoid(0.05), objective, backend="reference")(embeddings, labels)
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)


class FakeGPU:
    """Notes what is compiled and loaded; in the place of Triton's mode, too."""

    def __init__(self):
        self.names, self.loaded, self.error, self.pool = [], [], None, None

    def mode(self, pool):
        self.pool = pool
        return self

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.pool.shutdown(wait=True)
        self.pool = None
        if self.error and not self.refuses:
            raise self.error

    refuses = False

    def warmup(self, name, grid, **arguments):
        if self.refuses:
            raise self.error
        self.names.append(name)
        kernel = FakeKernel(name, self.loaded)
        return kernel if self.pool is None else SimpleNamespace(future=self.pool.submit(self.compile, kernel))

    def compile(self, kernel):
        time.sleep(0.05)  # the thread that asks goes on meanwhile
        return kernel


class FakeKernel:
    def __init__(self, name, loaded):
        self.name, self.loaded = name, loaded

    @property
    def run(self):
        self.loaded.append((self.name, threading.current_thread().name))


@pytest.fixture
def gpu(monkeypatch):
    """As if tensors were on a GPU: kernels are run by the interpreter, and the dry run asks the fake to compile."""
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles one kernel after the other")
    fake = FakeGPU()
    monkeypatch.setattr(first_call, "_compiled", set())
    monkeypatch.setattr(torch.cuda, "device", type("device", (nullcontext,), {}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton, "AsyncCompileMode", fake.mode)
    together, made = first_call.compile_together, first_call.dry_run
    functions = {}

    def on_gpu(kinds, call, device):
        together(kinds, call, torch.device("cuda"))

    def dry_run_of_fakes(instead):
        def fake_instead(kernel, grid, arguments):
            instead(functions.setdefault(kernel, FakeFunction(kernel.__name__, fake)), grid, arguments)

        return made(fake_instead)

    monkeypatch.setattr(first_call, "compile_together", on_gpu)
    monkeypatch.setattr(first_call, "dry_run", dry_run_of_fakes)
    return fake


class FakeFunction:
    def __init__(self, name, gpu):
        self.__name__, self.gpu = name, gpu

    def warmup(self, grid, **arguments):
        return self.gpu.warmup(self.__name__, grid, **arguments)


def test_a_kind_of_call_is_compiled_once_and_loaded_by_other_threads(gpu):
    embeddings, labels = batch(4)
    loss = rg.RamboAPLoss(backend="triton", precision="fast", cuda_graphs=False)
    for _ in range(2):
        loss(embeddings, labels)
    assert sorted(set(gpu.names)) == sorted(EMBEDDINGS | FEW | BLACKBOX)
    assert gpu.names.count("backward_kernel") == 1
    assert {name for name, _ in gpu.loaded} == set(gpu.names)
    assert threading.current_thread().name not in {thread for _, thread in gpu.loaded}
    # those that take longest first, before further variants of any
    assert gpu.names[:3] == ["backward_kernel", "count_kernel", "positives_kernel"]
    assert len(set(gpu.names[: len(set(gpu.names))])) == len(set(gpu.names))
    loss(embeddings[:64], labels[:64])  # of another size, which compiles nothing
    assert gpu.names.count("backward_kernel") == 1
    assert gpu.names.count("operand_kernel") == 1
    loss.precision = "high"
    loss(embeddings, labels)
    assert gpu.names.count("operand_kernel") == 2


def test_what_the_capture_of_the_next_call_launches_is_compiled_with_the_first(gpu, monkeypatch):
    monkeypatch.setattr(functional, "_may_capture", lambda leaf, config: True)
    embeddings, labels = batch(4)
    rg.FastAPLoss(backend="triton", precision="fast")(embeddings, labels)
    assert set(gpu.names) == EMBEDDINGS | FEW | {"class_kernel", "place_kernel"}


def test_levels_of_labels_are_not_indexed_by_an_order_that_no_kernel_has_written(gpu, monkeypatch):
    monkeypatch.setattr(functional, "_may_capture", lambda leaf, config: True)
    embeddings, labels = batch(4)
    levels = rg.Levels(torch.stack((labels, torch.arange(128, device=DEVICE) // 2), dim=1))
    rg.RankLoss(rg.Sigmoid(0.05), rg.NDCG(), backend="triton", precision="fast")(embeddings, relevance=levels)
    assert set(gpu.names) >= EMBEDDINGS | FEW | {"class_kernel", "place_kernel"}


def test_another_objective_compiles_its_kernel_with_the_others(gpu):
    embeddings, labels = batch(4)
    for objective in (rg.AveragePrecision(), rg.RecallAtK((1, 4)), rg.AveragePrecision()):
        rg.RankLoss(rg.Sigmoid(0.05), objective, backend="triton", precision="fast", cuda_graphs=False)(embeddings, labels)
    assert gpu.names.count("recall_kernel") == 1
    assert gpu.names.count("operand_kernel") == 2, "the third call is of a kind with the first"


@pytest.mark.parametrize("failing", ["the dry run", "asking Triton"])
def test_what_fails_before_kernels_are_compiled_does_not_stop_the_call(gpu, monkeypatch, failing):
    if failing == "the dry run":
        monkeypatch.setattr(first_call.StandIn, "__call__", lambda self, ranks: 1 / 0)
    gpu.error, gpu.refuses = TypeError("no such argument"), failing == "asking Triton"
    if not gpu.refuses:
        gpu.error = None
    embeddings, labels = batch(4)
    loss = rg.FastAPLoss(backend="triton", precision="high", cuda_graphs=False)
    expected = rg.FastAPLoss(backend="reference")(embeddings, labels)
    torch.testing.assert_close(loss(embeddings, labels).double(), expected, rtol=1e-4, atol=1e-5)
    assert launch_instead() is None


def test_an_error_of_the_compiler_is_that_of_the_call(gpu):
    gpu.error = RuntimeError("ptxas: no space left")
    embeddings, labels = batch(4)
    with pytest.raises(RuntimeError, match="ptxas: no space left"):
        rg.FastAPLoss(backend="triton", precision="high", cuda_graphs=False)(embeddings, labels)


def test_there_is_no_dry_run_while_a_graph_is_captured_or_without_the_mode(gpu, monkeypatch):
    embeddings, labels = batch(4)
    loss = rg.FastAPLoss(backend="triton", precision="fast", cuda_graphs=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loss(embeddings, labels)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delattr(triton, "AsyncCompileMode")
    loss(embeddings, labels)
    assert gpu.names == []


WITHOUT_GPU = """
import threading
from contextlib import nullcontext
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton import knobs

class Driver:  # of a GPU that is not here
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def launcher_cls(self, source, metadata): launchers.append((source.fn.__name__, source.signature["normalized"]))

launchers = []
driver.set_active(Driver())
torch.cuda.device, torch.cuda.is_current_stream_capturing = lambda device: nullcontext(), lambda: False
from rankgrad.ops.triton.operands import normalize
from rankgrad.ops.triton.first_call import compile_together
compiled = []

def listen(*, src, **_):
    compiled.append((src.name, threading.current_thread() is threading.main_thread()))

knobs.compilation.listener = listen
compile_together(frozenset({"a"}), lambda: normalize(torch.ones(4, 16, requires_grad=True)), torch.device("cuda"))
print(*sorted(compiled))
print(*sorted(launchers))  # each ahead, and again when its kernel is loaded
assert knobs.runtime.jit_cache_hook is None
"""


def without_interpreter(script, **environment):
    """What a script prints in a process whose kernels are Triton's own."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=inherited | environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_triton_compiles_them_in_threads(tmp_path):
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles one kernel after the other")
    compiled = without_interpreter(WITHOUT_GPU, TRITON_CACHE_DIR=str(tmp_path))
    kernels, launchers = compiled.splitlines()
    assert kernels == "('normalize_bwd_kernel', False) ('normalize_kernel', False)"
    assert launchers == " ".join(f"('{name}', '*fp32')" for name in sorted(NORMALIZE) for _ in range(2))
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


OTHER_SIZES = """
import torch
import rankgrad as rg
from rankgrad._gpu import Gpu, as_if_on
from rankgrad._dry_run import dry_run

gpu, found = Gpu.named("h100", caller=""), {}

def variant(parameter, value):
    if parameter.is_constexpr:
        return str(value)
    if isinstance(value, torch.Tensor):
        told_apart = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        return value.dtype, told_apart and value.data_ptr() % 16
    return type(value), isinstance(value, int) and not parameter.do_not_specialize and (value == 1, value % 16 == 0)

def note(kernel, grid, arguments):
    variants = tuple(variant(parameter, arguments.get(parameter.name)) for parameter in kernel.params)
    found.setdefault((loss, per_class, precision, kernel.fn), {}).setdefault(variants, items)

for loss in (rg.RecallAtKLoss(), rg.FastAPLoss(), rg.RamboAPLoss()):
    for precision in ("fast", "high"):
        for per_class in (4, 40):
            for items in (96, 100, 257, 2048, 2050):
                made = type(loss)(backend="triton", precision=precision)
                with as_if_on(gpu), dry_run(note):
                    made(torch.randn(items, 64, requires_grad=True), torch.arange(items) // per_class)
for (loss, per_class, precision, kernel), variants in found.items():
    if len(set(variants.values())) > 1:
        print(f"{loss.name}, {precision}, {per_class} per class: {kernel.__name__} compiled anew at", *variants.values())
"""


def test_another_batch_size_compiles_nothing():
    assert without_interpreter(OTHER_SIZES) == ""
