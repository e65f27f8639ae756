"""Rank losses in transformers.Trainer."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

import rankgrad as rg  # noqa: E402
from rankgrad.integrations.hugging_face import compute_loss_func  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend

LABELS = torch.arange(48) % 6
INPUTS = torch.nn.functional.one_hot(LABELS, 6).float() + torch.randn(48, 6, generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, inputs):
        return {"embeddings": self.net(inputs)}


def trained(tmp_path, batch_size, accumulate):
    torch.manual_seed(0)
    model = Encoder()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    dataset = datasets.Dataset.from_dict({"inputs": INPUTS.tolist(), "labels": LABELS.tolist()})
    transformers.Trainer(
        model, arguments, train_dataset=dataset, compute_loss_func=compute_loss_func(rg.SmoothAPLoss())
    ).train()
    return model.net.weight.detach()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_follows_the_mean_over_accumulated_batches(tmp_path, accumulate):
    found = trained(tmp_path, 24, accumulate)
    torch.manual_seed(0)
    model = Encoder()
    batches = [slice(24 * i, 24 * (i + 1)) for i in range(accumulate)]
    sum(rg.SmoothAPLoss()(model.net(INPUTS[b]), LABELS[b]) for b in batches).div(accumulate).backward()
    torch.testing.assert_close(found, model.net.weight.detach() - 0.1 * model.net.weight.grad)


def test_the_embeddings_are_found_or_the_fields_are_named():
    emb = torch.randn(6, 4)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    loss = rg.SmoothAPLoss()
    expected = loss(emb, labels)
    assert torch.equal(compute_loss_func(loss)(emb, labels), expected)
    assert torch.equal(compute_loss_func(loss)({"pooler_output": emb}, labels), expected)
    assert torch.equal(compute_loss_func(loss, "mine")({"mine": emb, "pooler_output": -emb}, labels), expected)
    with pytest.raises(ValueError, match="must have one of mine, got pooler_output; name the field"):
        compute_loss_func(loss, "mine")({"pooler_output": emb}, labels)
    with pytest.raises(TypeError, match="a tensor or a mapping with the embeddings, got list"):
        compute_loss_func(loss)([emb], labels)


def test_a_trained_model_goes_to_the_hub_and_comes_back(tmp_path, monkeypatch):
    from rankgrad import cli
    from rankgrad.integrations.hugging_face import HubEmbedder

    monkeypatch.chdir(tmp_path)
    train = ["train", "glyphs-smooth-ap", "--debug", "--out", "run", "--device", "cpu", "--no-tensorboard"]
    assert cli.main(train) == 0
    trained = rg.load("run", "cpu")
    card = "---\nlicense: mit\n---\n\n# glyphs\n\nmAP 0.5 [0.4, 0.6], all-vs-all\n"
    HubEmbedder.of(trained, card).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").read_text().strip() == card.strip()
    found = HubEmbedder.from_pretrained(str(tmp_path / "saved")).eval()
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(found(pixels), trained.model(pixels), rtol=0, atol=1e-5)
    assert found.preprocess == trained.preprocess
    assert callable(found.push_to_hub)


def test_an_encoder_of_texts_has_a_place_of_its_own():
    from rankgrad.integrations.hugging_face import HubEmbedder

    with pytest.raises(ValueError, match="rankgrad export RUN"):
        HubEmbedder({"trunk": "x", "inputs": "texts"}, {})
