"""The Lightning callback: metrics of the whole validation epoch under their names."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

import rankgrad as rg
from rankgrad.integrations.lightning import RetrievalMetrics

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend

LABELS = torch.arange(48) % 6
INPUTS = torch.nn.functional.one_hot(LABELS, 6).float() + torch.randn(48, 6, generator=torch.Generator().manual_seed(0))


class Model(LightningModule):
    def __init__(self, *, returns_embeddings=True):
        super().__init__()
        self.net, self.loss, self.returns_embeddings = nn.Linear(6, 4), rg.RecallAtKLoss(), returns_embeddings

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return {"embeddings": self.net(batch[0]), "labels": batch[1]} if self.returns_embeddings else None

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer(tmp_path, callback, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(default_root_dir=tmp_path, accelerator="cpu", callbacks=[callback], **quiet, **settings)


@pytest.fixture
def loader():
    return DataLoader(TensorDataset(INPUTS, LABELS), batch_size=20)


def test_the_metrics_of_all_batches_are_logged(tmp_path, loader):
    model, callback = Model(), RetrievalMetrics(metrics=["R@1", "mAP"])
    run = trainer(tmp_path, callback, max_epochs=1)
    run.fit(model, loader, loader)
    expected = rg.evaluate(model.net(INPUTS).detach(), LABELS)
    assert run.callback_metrics["val_mAP"].item() == pytest.approx(expected["mAP"])
    assert "val_R@1" in run.callback_metrics
    run.test(model, loader, verbose=False)
    assert run.callback_metrics["test_mAP"].item() == pytest.approx(expected["mAP"])
    assert callback.result["mAP"] == pytest.approx(expected["mAP"])


def test_a_step_that_returns_nothing_is_explained(tmp_path, loader):
    with pytest.raises(TypeError, match="must return a dictionary with 'embeddings' and 'labels', got NoneType"):
        trainer(tmp_path, RetrievalMetrics()).validate(Model(returns_embeddings=False), loader, verbose=False)


def test_each_of_several_loaders_has_its_own_metrics(tmp_path, loader):
    model, callback = Model(), RetrievalMetrics(metrics=["mAP"])
    half = DataLoader(TensorDataset(INPUTS[:24], LABELS[:24]), batch_size=10)
    model.validation_step = lambda batch, batch_idx, dataloader_idx=0: Model.validation_step(model, batch, batch_idx)
    run = trainer(tmp_path, callback)
    run.validate(model, [loader, half], verbose=False)
    for number, rows in enumerate((slice(None), slice(24))):
        expected = rg.evaluate(model.net(INPUTS[rows]).detach(), LABELS[rows])["mAP"]
        assert run.callback_metrics[f"val_mAP/dataloader_idx_{number}"].item() == pytest.approx(expected)


def test_the_sanity_check_may_find_nothing(tmp_path):
    labels = torch.arange(48) % 24  # the first 24 items have no relevant one among them
    sparse = DataLoader(TensorDataset(INPUTS, labels), batch_size=12)
    run = trainer(tmp_path, RetrievalMetrics(metrics=["mAP"]), max_epochs=1, num_sanity_val_steps=2)
    run.fit(Model(), DataLoader(TensorDataset(INPUTS, labels), batch_size=48), sparse)
    assert "val_mAP" in run.callback_metrics


def test_an_unknown_metric_is_explained(tmp_path, loader):
    with pytest.raises(ValueError, match="RetrievalMetrics: there is no metric 'MAP'"):
        trainer(tmp_path, RetrievalMetrics(metrics=["MAP"])).validate(Model(), loader, verbose=False)
