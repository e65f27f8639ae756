"""The benchmark command on a small batch, and the formulations it measures ours against."""

import csv
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import losses, presets
from benchmarks.baselines import BASELINES, dense, dense_baseline, floors, libraries, sorts, torch_products
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import Timing, peak_memory, share_of_others, timed_in_turns
from benchmarks.synthetic import hard_batch
from torch.nn.functional import normalize

from rankgrad.ops import cpu_products

CPU = torch.device("cpu")


def value_and_gradient(function, count=36, per_class=3):
    embeddings, labels = hard_batch(count, 16, per_class, dtype=torch.float64)
    embeddings.requires_grad_()
    value = function(embeddings, labels, per_class)
    return value, torch.autograd.grad(value, embeddings)[0]


def slow_smooth_ap(embeddings, labels, per_class):
    unit = normalize(embeddings)
    precisions = []
    for query in range(len(labels)):
        scores = unit @ unit[query]
        candidates = [item for item in range(len(labels)) if item != query]
        relevant = [item for item in candidates if labels[item] == labels[query]]
        for item in relevant:

            def rank(among, item=item, scores=scores):
                others = [other for other in among if other != item]
                return 1 + torch.sigmoid((scores[others] - scores[item]) / presets.TAU_RANK).sum()

            precisions.append(rank(relevant) / rank(candidates))
    return 1 - torch.stack(precisions).mean()


def slow_rambo(weight, lam, margin):
    """Algorithm 1 with two full rankings of every list; `weight` gives loss and slope of (rank, positive_rank)."""

    def loss(embeddings, labels, per_class):
        unit = normalize(embeddings)
        scores = unit @ unit.T
        count, total, gradient = len(labels), 0.0, torch.zeros_like(scores)
        for query in range(count):
            candidates = torch.arange(count) != query
            relevant = (labels == labels[query])[candidates]
            shifted = scores[query, candidates].detach() + (0.5 - relevant.double()) * margin
            rank = (shifted >= shifted[:, None]).sum(1).double()
            positive_rank = ((shifted >= shifted[:, None]) & relevant).sum(1).double()
            value, slope = weight(rank, positive_rank)
            share = relevant.double() / relevant.sum() / count
            total += (share * value).sum()
            moved = shifted + lam * (count - 1) * share * slope
            gradient[query, candidates] = ((moved >= moved[:, None]).sum(1) - rank) / (lam * (count - 1))
        surrogate = (scores * gradient).sum()
        return total + surrogate - surrogate.detach()

    return loss


def loglog(rank, positive_rank):
    ahead = (rank - positive_rank).clamp(min=0)  # only the relevant ones count, and theirs is never below 0
    return torch.log1p(torch.log1p(ahead)), 1 / (1 + torch.log1p(ahead)) / (1 + ahead)


def precision(rank, positive_rank):
    return 1 - positive_rank / rank, positive_rank / rank**2


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (dense.dense_recall_at_k, dense.loop_recall_at_k),
        (dense.dense_smooth_ap, slow_smooth_ap),
        (dense.dense_fast_ap, libraries.library_fast_ap),
        (sorts.sorted_rambo_recall, slow_rambo(loglog, presets.RECALL_LAM, presets.RECALL_MARGIN)),
        (sorts.sorted_rambo_ap, slow_rambo(precision, presets.AP_LAM, presets.AP_MARGIN)),
    ],
    ids=["recall_at_k", "smooth_ap", "fast_ap", "rambo_recall", "rambo_ap"],
)
@pytest.mark.parametrize("per_class", [2, 3, 6])
def test_baselines_agree_with_each_other(function, other, per_class):
    value, gradient = value_and_gradient(function, per_class=per_class)
    other_value, other_gradient = value_and_gradient(other, per_class=per_class)
    torch.testing.assert_close(value, other_value, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient, other_gradient, rtol=0, atol=1e-10)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("loss", list(presets.PRESETS))
def test_baselines_agree_with_the_definition(loss):
    value, gradient = value_and_gradient(losses._ours(loss, "reference"))
    baseline = dense_baseline(loss)
    baseline_value, baseline_gradient = value_and_gradient(baseline.function)
    torch.testing.assert_close(value, baseline_value, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient, baseline_gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss", list(presets.PRESETS))
def test_torch_multiplies_in_both_passes_where_rankgrad_would_not(loss, monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_products, "_is_faster", lambda: True)
    monkeypatch.setattr(cpu_products, "_onednn", lambda left, right: asked.append(left) or left @ right.t())
    # a batch in several tiles, with products that are not too small for oneDNN
    batch = hard_batch(1_200, 32, 3)
    by_onednn, by_torch = (
        losses._value_and_gradient(function, batch, 3)
        for function in (losses._ours(loss, "auto"), torch_products.with_torch_products(loss))
    )
    both = len(asked)
    losses._value_and_gradient(torch_products.with_torch_products(loss), batch, 3)
    assert len(asked) == both > 0
    torch.testing.assert_close(by_torch, by_onednn)


def test_the_marked_baseline_computes_something_else():
    _, gradient = value_and_gradient(libraries.library_smooth_ap)
    _, true_gradient = value_and_gradient(dense.dense_smooth_ap)
    assert (gradient - true_gradient).norm() > 0.5 * true_gradient.norm()


def test_a_sample_of_the_loop_is_the_loss_of_those_queries():
    def loss_of_twelve(first):
        def loss(embeddings, labels, per_class):
            return dense.loop_recall_at_k(embeddings.roll(-first, 0), labels.roll(-first), per_class, queries=12)

        return value_and_gradient(loss)[0]

    parts = torch.stack([loss_of_twelve(first) for first in (0, 12, 24)])
    torch.testing.assert_close(parts.mean(), value_and_gradient(dense.loop_recall_at_k)[0])


ARGUMENTS = ["--losses", "recall_at_k", "--formulations", "ours,dense", "--sizes", "64", "--dim", "32"]
ARGUMENTS += ["--seconds", "0.01", "--device", "cpu"]


def test_a_floor_visits_every_pair_of_blocks_in_both_passes(monkeypatch):
    monkeypatch.setattr(floors, "SIDE", 12)
    visited = []
    counted, differentiated = (
        lambda tiles, name=name: visited.append((name, tiles.relevant)) for name in ("count", "gradient")
    )
    value, gradient = value_and_gradient(lambda *batch: floors.floor(counted, differentiated, *batch))
    assert visited == [("count", 2)] * 9 + [("gradient", 2)] * 9
    embeddings = hard_batch(36, 16, 3, dtype=torch.float64)[0]
    last = embeddings[24:] @ embeddings[24:].t()
    assert torch.allclose(value, last.sum())
    assert torch.allclose(gradient, embeddings.sum(dim=0).expand_as(gradient))  # tiles of ones


@pytest.mark.parametrize("name", ["products", "operators"])
def test_floors_run_on_a_last_block_that_is_shorter(name, monkeypatch):
    monkeypatch.setattr(floors, "SIDE", 16)
    chosen = [baseline for baseline in BASELINES if baseline.name == name]
    assert chosen
    for baseline in chosen:
        assert baseline.differs
        value_and_gradient(baseline.function)


def test_the_command_prints_and_records(tmp_path, capsys):
    start = time.monotonic()
    assert losses.main([*ARGUMENTS, "--csv", str(tmp_path / "rows.csv")]) == 0
    assert time.monotonic() - start < 60, "two formulations of 64 items are a matter of seconds even on a busy machine"
    printed = capsys.readouterr().out
    assert "N = 64" in printed
    assert "time/ours" in printed
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["formulation"] for row in rows] == ["ours", "dense"]
    for row in rows:
        assert float(row["seconds_20"]) <= float(row["seconds"]) <= float(row["seconds_80"])
        assert float(row["gradient_error"]) < losses.GRADIENT_TOLERANCE
        assert row["torch"] == torch.__version__
        assert row["machine"]
        assert row["date"]


def test_what_does_not_fit_is_skipped_with_its_estimate(capsys, monkeypatch):
    monkeypatch.setattr(losses, "in_child", lambda *_: 1)
    assert losses.main([*ARGUMENTS, "--memory-limit", "1e-5"]) == 0
    assert "skipped: needs about" in capsys.readouterr().out


def test_a_wrong_formulation_stops_the_run(capsys, monkeypatch):
    def twice(embeddings, labels, per_class):
        return 2 * dense.dense_recall_at_k(embeddings, labels, per_class)

    wrong = tuple(replace(baseline, function=twice) if baseline.name == "dense" else baseline for baseline in BASELINES)
    monkeypatch.setattr(losses, "BASELINES", wrong)
    assert losses.main(ARGUMENTS) == 1
    printed = capsys.readouterr().out
    assert "nothing is timed" in printed
    assert "recall_at_k dense" in printed
    assert "N = 64\nloss  formulation  ms" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--losses", "recall"], "choose from recall_at_k"),
        (["--sizes", "100,many"], "whole numbers"),
        (["--sizes", "30"], "at least two classes of 4"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        losses.main(arguments)
    assert message in capsys.readouterr().err


def test_quick_yields_to_other_flags():
    options = losses._options(["--quick", "--sizes", "128"])
    assert options.sizes == [128]
    assert options.seconds == losses.QUICK["seconds"]


def test_growth_is_a_power_of_the_batch_size():
    baseline = BASELINES[0]
    error = losses.NumericalError(0.0, 0.0)
    small = losses.LossMeasurement(baseline=baseline, count=512, error=error, memory=100, timing=Timing(1.0, 1.0, 1.0, 3))
    large = losses.LossMeasurement(baseline=baseline, count=2048, error=error, memory=400, timing=Timing(16.0, 16.0, 16.0, 3))
    record = losses._record(large, [large], [small])
    assert record["time_power"] == pytest.approx(2)
    assert record["memory_power"] == pytest.approx(1)


def test_calls_take_turns():
    log = []

    def slow():
        log.append("slow")
        time.sleep(0.02)

    timings = timed_in_turns([slow, lambda: log.append("fast")], CPU, 0.01)
    assert [timing.repetitions >= 3 for timing in timings] == [True, True]
    last_slow = len(log) - 1 - log[::-1].index("slow")
    assert "fast" in log[log.index("slow") : last_slow]
    assert 0.02 <= timings[0].low <= timings[0].median <= timings[0].high


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells")
def test_own_work_is_not_that_of_others():
    result, share = share_of_others(lambda: sum(range(3_000_000)))
    assert result == 4_499_998_500_000
    assert 0 <= share <= 1.2  # the clock ticks are coarse


def test_peak_memory_sees_what_is_freed_again():
    def call():
        big = torch.ones(16 << 20)  # 64 MiB
        return big.sum()

    call()
    assert 60 << 20 < peak_memory(call, CPU) < 80 << 20


def test_a_batch_is_balanced_shuffled_and_reproducible():
    embeddings, labels = hard_batch(40, 8, 4)
    assert torch.equal(labels.bincount(), torch.full((10,), 4))
    assert not torch.equal(labels, labels.sort().values)
    assert torch.equal(embeddings, hard_batch(40, 8, 4)[0])
    with pytest.raises(ValueError, match="multiple of per_class"):
        hard_batch(41, 8, 4)


def test_tables_align_and_refuse_other_columns(tmp_path):
    text = text_table([{"name": "a", "ms": "1.5", "note": ""}, {"name": "long", "ms": "10", "note": ""}])
    assert text.splitlines() == ["name   ms", "a     1.5", "long   10"]
    path = tmp_path / "new" / "rows.csv"
    append_csv(path, [{"a": 1}])
    append_csv(path, [{"a": 2}])
    assert path.read_text() == "a\n1\n2\n"
    with pytest.raises(ValueError, match="has the columns"):
        append_csv(path, [{"b": 1}])
