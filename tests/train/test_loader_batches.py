"""`rg.fit` with a DataLoader of one's own: the same batches whatever the workers, and exact resume."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from train.tiny_loop import CLASSES, WIDTH, held_out, network

import rankgrad as rg
from rankgrad.train.loader_batches import LoaderBatches


class Noisy(Dataset):
    """Class centres with noise from all three generators that people use."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        noise = torch.randn(WIDTH) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return torch.eye(CLASSES, WIDTH)[index % CLASSES] + 0.1 * noise, index % CLASSES


def loader(**options):
    return DataLoader(Noisy(), **{"batch_size": 12, "shuffle": True, **options})


def epoch_of(batches, epoch, start=0):
    batches.set_epoch(epoch)
    return list(batches.iterate(start))


def same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_do_not_depend_on_workers_position_or_the_state_of_generators(workers):
    wanted = epoch_of(LoaderBatches(loader(), seed=3), 1)
    assert sorted(torch.cat([indices for _, indices, _, _ in wanted]).tolist()) == list(range(60))
    torch.manual_seed(99)
    random.seed(99)
    before = torch.get_rng_state(), random.getstate()
    batches = LoaderBatches(loader(num_workers=workers), seed=3)
    same(epoch_of(batches, 1), wanted)
    same(epoch_of(batches, 1, start=2), wanted[2:])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert not torch.equal(epoch_of(batches, 2)[0][1], wanted[0][1]), "another epoch has another order"
    assert not torch.equal(epoch_of(LoaderBatches(loader(), seed=4), 1)[0][2], wanted[0][2])


def test_a_generator_of_the_loader_is_seeded_too():
    first, second = (LoaderBatches(loader(generator=torch.Generator().manual_seed(i))) for i in (1, 2))
    epoch_of(first, 0)
    same(epoch_of(first, 1), epoch_of(second, 1))


def test_fit_resumes_a_dataloader_exactly(tmp_path):
    def run(folder, steps, *, resume=False):
        model = network()
        settings = rg.TrainSettings(steps=steps, lr=1e-2, metric="margin", chunk_size=5)
        evaluators = {"validation": held_out}
        rg.fit(
            model, rg.FastAPLoss(), loader(), settings, folder, evaluators=evaluators, select="validation", resume=resume
        )  # fmt: skip
        return nn.utils.parameters_to_vector(model.parameters())

    run(tmp_path / "a", 7)
    continued = run(tmp_path / "a", 12, resume=True)
    assert torch.equal(continued, run(tmp_path / "b", 12))


def test_dicts_are_batches_too():
    def collate(items):
        images, labels = zip(*items, strict=True)
        return {"images": torch.stack(images), "labels": torch.tensor(labels)}

    _, _, images, labels = epoch_of(LoaderBatches(loader(collate_fn=collate)), 0)[0]
    assert images.keys() == {"images"}
    assert labels.shape == (12,)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.ones(3), 0


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), TypeError, "a dataset with indices and with a batch size"),
        (lambda: DataLoader(Noisy(), batch_size=None), TypeError, "a dataset with indices and with a batch size"),
        (lambda: loader(collate_fn=lambda items: items[0][0]), TypeError, r"must yield \(images, labels\) or a dict"),
        (
            lambda: loader(collate_fn=lambda items: (torch.ones(3, WIDTH), torch.ones(2))),
            ValueError,
            "3 images and 2 labels for 12",
        ),
    ],
)
def test_other_loaders_are_refused(tmp_path, batches, error, message):
    with pytest.raises(error, match=message):
        rg.fit(network(), rg.FastAPLoss(), batches(), rg.TrainSettings(epochs=1), tmp_path)
