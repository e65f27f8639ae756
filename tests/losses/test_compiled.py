"""Losses inside torch.compile: one graph, the value and gradients of the eager call."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import rankgrad as rg
from rankgrad.ops import functional
from rankgrad.ops.backends import resolve_precision

GENERATOR = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(12, 7, generator=GENERATOR), torch.arange(12) % 4
WEIGHTS = torch.rand(12, generator=GENERATOR)

LOSSES = {
    "recall_at_k": rg.RecallAtKLoss,
    "fastap": rg.FastAPLoss,
    "rambo": lambda: rg.RamboAPLoss(lam=2.0),
    "sup_ap, learned tau": lambda: rg.SupAPLoss(0.1, learn_tau=True),
    "simix": lambda: rg.SiMix(rg.SmoothAPLoss()),
    "memory": lambda: rg.EmbeddingMemory(rg.SmoothAPLoss(), 2),
    "proxies": lambda: rg.CalibratedRankLoss(rg.SmoothAPLoss(), rg.ProxySoftmax(4, 5)),
}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5))


def run(step, model, loss) -> list[Tensor]:
    """Values and gradients of two steps, so that a memory has something to remember."""
    found = []
    for number in range(2):
        torch.manual_seed(number)
        value = step(IMAGES + number)
        (3 * value).backward()
        found += [value.detach(), *(p.grad.clone() for p in (*model.parameters(), *loss.parameters()))]
    return found


@pytest.fixture(autouse=True)
def fresh():
    with warnings.catch_warnings():  # those of the compiler's own imports
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_whole_graph_with_the_values_of_eager_calls(name, backend):
    model = network()
    loss = LOSSES[name]()
    other_model, other_loss = copy.deepcopy(model), copy.deepcopy(loss)
    compiled = torch.compile(lambda images: loss(model(images), LABELS), fullgraph=True, backend=backend)
    found = run(compiled, model, loss)
    wanted = run(lambda images: other_loss(other_model(images), LABELS), other_model, other_loss)
    torch.testing.assert_close(found, wanted)
    assert loss.used_queries == other_loss.used_queries
    assert any(gradient.abs().max() > 1e-4 for gradient in wanted[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_scale_of_16_bit_training(dtype, monkeypatch):
    precisions = []

    def resolved(precision, embeddings):
        precisions.append(resolve_precision(precision, embeddings))
        return precisions[-1]

    monkeypatch.setattr(functional, "resolve_precision", resolved)
    loss, images = rg.SmoothAPLoss(), (1000 * IMAGES).to(dtype)  # the longer they are, the smaller is their gradient
    compiled = torch.compile(lambda x: loss(x, LABELS), fullgraph=True, backend="aot_eager")
    found = []
    for step in (compiled, lambda x: loss(x, LABELS)):
        x = images.clone().requires_grad_()
        (step(x) * 2.0**16).backward()  # beyond float16
        found.append(x.grad)
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0], found[1])
    assert set(precisions) == {"fast"}, "that of 16-bit embeddings"


def test_references_weights_and_given_scores():
    model, loss, score_loss = network(), rg.SmoothAPLoss(0.1), rg.ApproxNDCGLoss()
    self_index = torch.arange(12)

    def step(images: Tensor) -> Tensor:
        embeddings = model(images)
        value = loss(embeddings, LABELS, embeddings, LABELS, self_index=self_index, weights=WEIGHTS)
        scores = embeddings[:, 0].sin()
        return value + score_loss.from_scores(scores, LABELS % 3, group_sizes=[5, 7]) + 0 * embeddings.sum()

    found = run(torch.compile(step, fullgraph=True, backend="aot_eager"), model, loss)
    model = network()
    torch.testing.assert_close(found, run(step, model, loss))


def test_without_a_gradient_none_is_computed():
    model, loss = network(), rg.SmoothAPLoss()
    compiled = torch.compile(lambda images: loss(model(images), LABELS), fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            value = compiled(IMAGES)
        assert not value.requires_grad
        torch.testing.assert_close(value, loss(model(IMAGES), LABELS).detach())


def test_a_copy_is_called_as_itself():
    loss = rg.SmoothAPLoss(0.1)
    other = copy.copy(loss)
    other.objective = rg.LogRecall()
    model = network()
    both = torch.compile(lambda x: (loss(model(x), LABELS), other(model(x), LABELS)), fullgraph=True, backend="eager")
    torch.testing.assert_close(both(IMAGES), (loss(model(IMAGES), LABELS), other(model(IMAGES), LABELS)))


LEVELS = torch.stack((LABELS % 2, LABELS), dim=1)
QUERY, ITEM, GAIN = torch.arange(6), torch.arange(6, 12), torch.arange(6) + 1.0


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: rg.Pairs(QUERY, ITEM), rg.SmoothAPLoss()),
        (lambda: rg.Pairs(QUERY, ITEM, GAIN), rg.ApproxNDCGLoss()),
        (lambda: rg.Pairs(QUERY, ITEM), rg.EmbeddingMemory(rg.SmoothAPLoss(), 2)),
        (lambda: rg.Levels(LEVELS), rg.RankLoss(rg.Sigmoid(0.1), rg.HierarchicalAveragePrecision())),
        (lambda: rg.Levels(LEVELS, gains=[0.1, 2]), rg.ApproxNDCGLoss()),
        (lambda: rg.Levels(LEVELS), rg.SiMix(rg.ApproxNDCGLoss())),
    ],
)
def test_pairs_and_levels_leave_the_graph_whole(make, loss):
    relevance, model, other_model, other_loss = make(), network(), network(), copy.deepcopy(loss)
    step = torch.compile(lambda images: loss(model(images), relevance=relevance), fullgraph=True, backend="aot_eager")
    found = run(step, model, loss)
    wanted = run(lambda images: other_loss(other_model(images), relevance=relevance), other_model, other_loss)
    torch.testing.assert_close(found, wanted)


def test_pairs_made_in_the_graph_and_both_ways():
    model, loss = network(), rg.both_ways(rg.SmoothAPLoss(0.1))

    def step(images: Tensor, query: Tensor, item: Tensor) -> Tensor:
        first, second = model(images), model(images.flip(0))
        return loss(first, second, relevance=rg.Pairs(query, item)) + loss(first, second, LABELS)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IMAGES, QUERY, ITEM), step(IMAGES, QUERY, ITEM))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels inside a compiled model need a GPU")
@pytest.mark.filterwarnings("ignore")  # those of the compiler
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_on_a_gpu(backend):
    images, labels = torch.randn(512, 7, device="cuda"), torch.arange(512, device="cuda") // 4
    pairs = rg.Pairs(torch.arange(256), torch.arange(256, 512), torch.rand(256) + 0.1)
    model, loss, graded = network().cuda(), rg.SmoothAPLoss(0.1), rg.ApproxNDCGLoss()

    def step(images: Tensor) -> Tensor:
        embeddings = model(images)
        return loss(embeddings, labels) + graded(embeddings, relevance=pairs)

    found = []
    for each in (step, torch.compile(step, fullgraph=True, backend=backend)):
        model.zero_grad()
        value = each(images)
        value.backward()
        found.append((value.detach(), *(p.grad.clone() for p in model.parameters())))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own, where a graph breaks
def test_one_loss_per_query_breaks_the_graph_once():
    model, loss = network(), rg.SmoothAPLoss(reduction="none")

    def step(images: Tensor) -> Tensor:
        return loss(model(images), LABELS).square().mean()

    explained = torch._dynamo.explain(step)(IMAGES)
    assert (explained.graph_count, explained.graph_break_count) == (2, 1), explained.break_reasons
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(step, backend="eager")(IMAGES), step(IMAGES))
