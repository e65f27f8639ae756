"""What needs no second process: parts of a loss, shares of a batch, the launcher's choice of words."""

import copy

import numpy as np
import pytest
import torch
from distributed.worker_cases import AROUND, PRESETS
from torch import nn

import rankgrad as rg
from rankgrad.cli.launch import _blame, _ending, _sentence, without_flag
from rankgrad.data.image_batches import ImageBatches
from rankgrad.data.image_store import ImageBuffer
from rankgrad.data.preprocessing import Augment
from rankgrad.data.samplers import Sequential
from rankgrad.eval import evaluate, evaluate_sharded
from rankgrad.ops import tile_layout
from rankgrad.train.loop import fit
from rankgrad.train.processes import Processes, join
from rankgrad.train.settings import TrainSettings
from rankgrad.train.sharding import check_batch_norm_is_synchronised


@pytest.fixture(params=[512, 7], ids=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(tile_layout, "tile_side", lambda device: request.param)


@pytest.mark.usefixtures("tiles")
# a term beside the ranks is of the whole batch, and every process has its share of it: `DistributedRankLoss` adds that up
@pytest.mark.parametrize("around", [name for name in AROUND if name != "proxies"])
@pytest.mark.parametrize("preset", PRESETS)
def test_parts_sum_up_to_the_loss(preset, around):
    torch.manual_seed(0)
    embeddings, labels = torch.randn(30, 6, dtype=torch.float64), torch.randint(7, (30,))
    labels[-4:] = torch.arange(90, 94)
    loss = AROUND[around](PRESETS[preset]())
    if around == "memory":
        loss.remember(torch.randn(11, 6, dtype=torch.float64), torch.randint(7, (11,)))
    options = ()
    if around == "simix":
        options = (copy.deepcopy(loss).draw(labels, embeddings),)
        loss.generator.manual_seed(5)
    whole, divided = (embeddings.clone().requires_grad_() for _ in range(2))
    shares = (slice(0, 5), slice(5, 26), slice(26, 30))
    parts = torch.stack([loss.shard_loss(divided, labels, own, *options) for own in shares])
    parts.sum().backward()
    value = loss(whole, labels)
    value.backward()
    assert abs(float((parts.sum() - value).detach())) < 1e-12
    assert float((divided.grad - whole.grad).abs().max() / whole.grad.abs().max()) < 1e-11
    if around != "simix":
        assert float(parts[2].detach().abs()) == 0, "these queries have nothing to find"


def test_a_process_alone_has_the_loss_itself():
    embeddings, labels = torch.randn(8, 4, requires_grad=True), torch.arange(8) // 2
    loss = rg.DistributedRankLoss(rg.SmoothAPLoss())
    assert torch.equal(loss(embeddings, labels), rg.SmoothAPLoss()(embeddings, labels))
    assert int(loss.used_queries) == 8
    assert torch.equal(loss.gathered[0], embeddings)


def test_what_cannot_be_distributed_is_refused():
    with pytest.raises(ValueError, match="DistributedRankLoss: loss must have reduction 'mean', got 'none'"):
        rg.DistributedRankLoss(rg.SmoothAPLoss(reduction="none"))
    with pytest.raises(
        TypeError, match="must be a RankLoss, SiMix, EmbeddingMemory or CalibratedRankLoss, got MulticlassRankLoss"
    ):
        rg.DistributedRankLoss(rg.MulticlassRankLoss())


@pytest.mark.parametrize("items", [3, 4, 13, 100])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_are_contiguous_and_even(items, size):
    shares = [Processes(rank, size).shard(items) for rank in range(size)]
    assert [i for own in shares for i in range(items)[own]] == list(range(items))
    lengths = [own.stop - own.start for own in shares]
    assert max(lengths) - min(lengths) <= 1


def test_processes_see_the_pixels_of_one():
    torch.manual_seed(0)
    pixels = torch.randint(256, (14, 3, 12, 12), dtype=torch.uint8)
    images = ImageBuffer(torch.cat((pixels.flatten(), torch.zeros(12, dtype=torch.uint8))), torch.full((14, 2), 12))

    def batches(part):
        augment = Augment("resized", flip=True)
        found = ImageBatches(images, np.arange(14), Sequential(14, 7), augment, 8, seed=4, shard=part)
        found.set_epoch(3)
        return list(found.iterate(1))

    ((_, indices, whole, labels),) = batches((0, 1))
    shares = [batches((i, 3))[0] for i in range(3)]
    assert [len(share.indices) for share in shares] == [2, 2, 3]
    assert torch.equal(torch.cat([share.indices for share in shares]), indices)
    assert torch.equal(torch.cat([share.images for share in shares]), whole)
    assert torch.equal(torch.cat([share.labels for share in shares]), labels)
    with pytest.raises(ValueError, match="the batch of step 1 has 7 images, too few for 8 processes"):
        batches((0, 8))
    with pytest.raises(ValueError, match=r"shard must be \(i, n\) with i from 0 to n - 1, got \(2, 2\)"):
        batches((2, 2))


def test_without_a_group_a_process_is_alone():
    with join(torch.device("cpu")) as processes:
        assert (processes.rank, processes.size, processes.first) == (0, 1, True)
        assert processes.gather(3) == [3]
        assert processes.all_max(-2) == -2
    embeddings, labels = torch.randn(20, 4), torch.arange(20) // 4
    assert dict(evaluate_sharded(embeddings, labels, ks=(1,))) == dict(evaluate(embeddings, labels, ks=(1,)))


def test_several_processes_want_a_loss_that_gathers(tmp_path):
    model = nn.Linear(4, 3)
    two = Processes(0, 2)
    with pytest.raises(ValueError, match="with 2 processes the loss must rank against all of them: wrap it in Distributed"):
        _fit(model, rg.SmoothAPLoss(), tmp_path, two)
    with pytest.raises(ValueError, match="'fsdp' has no scaled loss for precision 'fp16'"):
        _fit(model, rg.DistributedRankLoss(rg.SmoothAPLoss()), tmp_path, two, parallel="fsdp", precision="fp16")


def _fit(model, loss, folder, processes, **settings):
    class Agreeing(Processes):
        def on_first(self, call):
            return call()

    there = Agreeing(processes.rank, processes.size)
    fit(model, loss, [0], TrainSettings(steps=1, **settings), folder, processes=there)


def test_statistics_of_one_process_are_refused():
    check_batch_norm_is_synchronised(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"1 \(and 0 more\) would normalise with the statistics of one process"):
        check_batch_norm_is_synchronised(model)
    check_batch_norm_is_synchronised(model.eval())


def test_an_unknown_way_to_spread_a_model_is_refused():
    with pytest.raises(ValueError, match="parallel must be one of 'ddp', 'fsdp', got 'dp'"):
        TrainSettings(steps=1, parallel="dp")


def test_the_flag_that_launches_is_not_passed_on():
    line = ["sop", "--processes", "2", "--lr", "1", "--processes=4", "--debug"]
    assert without_flag(line, "--processes") == ["sop", "--lr", "1", "--debug"]


def test_the_process_to_name_is_the_one_that_did_not_just_follow():
    killed, failed, told, lost, asked = -9, 1, 2, 3, -15
    assert min([lost, told, asked, killed, failed], key=_blame) == killed
    assert min([lost, asked, told], key=_blame) == told
    assert _ending(1, 4, -9, "") == "rank 1 of 4 processes was ended by SIGKILL"
    assert _ending(1, 4, 2, "no such image") == "rank 1 of 4 processes stopped: no such image"
    assert _ending(0, 2, 1, "") == "rank 0 of 2 processes ended with status 1"
    recorded = {"message": "ValueError: a.jpg: no such image", "extraInfo": {"timestamp": "1"}}
    assert _sentence(recorded) == _sentence("ValueError: a.jpg: no such image") == "a.jpg: no such image"
