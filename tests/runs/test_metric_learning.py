"""Losses with proxies, of pytorch-metric-learning or beside a rank loss: trained, saved, resumed; the rest is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_datasets import build
from pytorch_metric_learning import losses
from safetensors.numpy import load_file

import rankgrad as rg
from rankgrad import cli
from rankgrad.integrations.pytorch_metric_learning import MetricLearningLoss, parse_arguments
from rankgrad.recipes.catalogue import find
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.task import RunContext

QUIET = ["--device", "cpu", "--cache", "none", "--no-tensorboard"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return build("folder", tmp_path_factory.mktemp("data") / "folder", classes=8, per_class=4)


def command(data, *flags):
    return ["train", "--data", str(data), "--debug", *QUIET, *map(str, flags)]


def test_labels_of_any_numbers_find_their_proxies():
    torch.manual_seed(0)
    ours = MetricLearningLoss("ProxyAnchorLoss", {"margin": 0.2}, [7, 3, 12], 5)
    assert ours.loss.proxies.shape == (3, 5)
    embeddings = torch.randn(4, 5)
    expected = ours.loss(embeddings, torch.tensor([1, 0, 2, 0]))
    assert torch.equal(ours(embeddings, torch.tensor([7, 3, 12, 3])), expected)
    assert ours.loss.margin == 0.2


def test_a_miner_selects_the_triplets():
    embeddings = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % 3
    mined = MetricLearningLoss("TripletMarginLoss", {}, [0, 1, 2], 5, "TripletMarginMiner", {"type_of_triplets": "semihard"})
    assert not torch.isclose(mined(embeddings, labels), losses.TripletMarginLoss()(embeddings, labels))


def test_arguments_are_literals_or_text():
    assert parse_arguments("margin=0.1, alpha=32,type_of_triplets=semihard,swap=True", "--loss-args") == {
        "margin": 0.1, "alpha": 32, "type_of_triplets": "semihard", "swap": True,
    }  # fmt: skip
    assert parse_arguments("", "--loss-args") == {}
    with pytest.raises(ValueError, match="--loss-args must be of the form name=value,name=value, got 'alpha'"):
        parse_arguments("alpha", "--loss-args")


@pytest.mark.parametrize(
    "loss",
    [
        ["--loss", "pml:ProxyAnchorLoss", "--loss-args", "alpha=16"],
        ["--loss", "sup-ap", "--simix", "--proxy-weight", 0.1, "--learn-tau"],
        ["--loss", "smooth-ap", "--proxy-weight", 0.4, "--proxy-loss", "anchor", "--proxy-temperature", 0.125],
    ],
    ids=["pml", "proxies beside a rank loss", "proxy anchors beside a rank loss"],
)
def test_proxies_are_trained_and_a_resumed_run_ends_like_one_that_was_never_stopped(loss, data, tmp_path):
    flags = [*loss, "--loss-lr", 100, "--schedule", "constant"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli.main(command(data, *flags, "--out", whole, "--epochs", 2)) == 0
    assert cli.main(command(data, *flags, "--out", parts, "--epochs", 1)) == 0
    assert (
        cli.main(["train", "--resume", str(parts), "--epochs", "2", "--device", "cpu", "--cache", "none", "--no-tensorboard"])
        == 0
    )
    for name in ("weights", "state"):
        files = [run / "checkpoints" / "step-00000004" / f"{name}.safetensors" for run in (whole, parts)]
        assert files[0].read_bytes() == files[1].read_bytes()
    # eight classes train, and 16 dimensions: proxies and their optimizer state are there and change
    first, last = (
        [v for v in load_file(whole / "checkpoints" / step / "state.safetensors").values() if v.shape == (8, 16)]
        for step in ("step-00000002", "step-00000004")
    )
    assert len(first) >= 2
    assert not any(np.array_equal(a, b) for a, b in zip(first, last, strict=True))


def test_proxies_of_a_recipe_are_those_that_it_names():
    recipe = replace(find("glyphs-smooth-ap"), proxy_weight=0.4, proxy_temperature=0.125, classes=12, batch_size=48)
    softmax, anchor = (
        RetrievalTask(replace(recipe, proxy_loss=name), RunContext(None, torch.device("cpu"))).local_loss()
        for name in ("softmax", "anchor")
    )
    assert isinstance(softmax.term, rg.ProxySoftmax)
    assert isinstance(anchor.term, rg.ProxyAnchor)
    assert (softmax.term.temperature, anchor.term.alpha, anchor.term.margin) == (0.125, 8.0, 0.1)
    assert (anchor.weight, anchor.term.proxies.shape) == (0.4, (12, 64))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "pml:ProxyAnkerLoss"], "has no loss 'ProxyAnkerLoss': did you mean 'ProxyAnchorLoss'?"),
        (
            ["--loss", "pml:ProxyAnchorLoss", "--loss-args", "colour=3"],
            "ProxyAnchorLoss of pytorch-metric-learning cannot",
        ),
        (["--loss", "pml:ProxyAnchorLoss", "--loss-args", "alpha"], "--loss-args must be of the form name=value"),
        (["--loss", "pml:ProxyAnchorLoss", "--simix"], "is for rank losses"),
        (["--loss", "pml:ProxyAnchorLoss", "--proxy-weight", "0.1"], "--proxy-weight is for rank losses"),
        (["--proxy-weight", "2"], "--proxy-weight"),
        (["--proxy-loss", "anchor"], "--proxy-loss is anchor, and there are no proxies: give a --proxy-weight"),
        (["--loss", "fastap", "--learn-tau"], "--learn-tau is for losses with a --tau, and --loss is fastap"),
        (["--learn-tau", "--tau-end", "0.1"], "--tau-end and --learn-tau exclude each other"),
        (["--loss", "fastap", "--loss-args", "a=1"], "is for losses of pytorch-metric-learning (pml:NAME)"),
        (["--loss", "fastpa"], "did you mean 'fastap'?"),
    ],
)
def test_what_does_not_fit_is_said(data, tmp_path, flags, message, capsys):
    try:
        status = cli.main(command(data, *flags, "--out", tmp_path / "run"))
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err
