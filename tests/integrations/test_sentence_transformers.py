"""Rank losses in SentenceTransformerTrainer: what a column means, exact cached gradients, balanced batches, evaluation."""

import pytest
import torch

pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")

from integrations.conftest import CLASSES, TEXTS  # noqa: E402
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments  # noqa: E402
from sentence_transformers.sentence_transformer import modules  # noqa: E402

import rankgrad as rg  # noqa: E402
from rankgrad.integrations.sentence_transformers import (  # noqa: E402
    CachedRankLoss,
    RankLoss,
    RetrievalEvaluator,
    class_balanced,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend


@pytest.fixture
def model(bert_folder):
    transformer = modules.Transformer(str(bert_folder))
    built = SentenceTransformer(modules=[transformer, modules.Pooling(transformer.get_embedding_dimension())], device="cpu")
    return built.eval()


def features(model, texts):
    return model.preprocess(texts) if hasattr(model, "preprocess") else model.tokenize(texts)


def embed(model, texts):
    return model(features(model, texts))["sentence_embedding"]


def test_a_text_column_with_classes_is_the_loss_of_labels(model):
    labels = torch.tensor(CLASSES)
    found = RankLoss(model, rg.SmoothAPLoss())([features(model, TEXTS)], labels)
    assert torch.equal(found, rg.SmoothAPLoss()(embed(model, TEXTS), labels))


def test_pairs_rank_all_positives_and_negatives_of_the_batch(model):
    anchors, positives, negatives = TEXTS[0::8], TEXTS[1::8], TEXTS[2::8]
    columns = [features(model, texts) for texts in (anchors, positives, negatives)]
    found = RankLoss(model, rg.SmoothAPLoss())(columns)
    a, p, n = (torch.nn.functional.normalize(embed(model, texts)) for texts in (anchors, positives, negatives))
    relevant = torch.cat((torch.eye(6, dtype=torch.bool), torch.zeros(6, 6, dtype=torch.bool)), dim=1)
    expected = rg.SmoothAPLoss().from_scores(a @ torch.cat((p, n)).t(), relevant)
    torch.testing.assert_close(found, expected)
    other_way = rg.SmoothAPLoss().from_scores(p @ a.t(), torch.eye(6, dtype=torch.bool))
    both = RankLoss(model, rg.SmoothAPLoss(), symmetric=True)(columns)
    torch.testing.assert_close(both, (expected + other_way) / 2)


def test_graded_documents_are_one_list_per_query(model):
    loss = rg.RankLoss(rg.Sigmoid(0.1), rg.NDCG())
    grades = torch.tensor([[2, 0, 1], [0, 3, 0]])
    columns = [TEXTS[0:2], TEXTS[8:10], TEXTS[16:18], TEXTS[24:26]]
    found = RankLoss(model, loss)([features(model, texts) for texts in columns], grades)
    query, *documents = (torch.nn.functional.normalize(embed(model, texts)) for texts in columns)
    scores = torch.stack([(query * document).sum(dim=1) for document in documents], dim=1)
    torch.testing.assert_close(found, loss.from_scores(scores, grades))


@pytest.mark.parametrize(
    ("columns", "labels", "message"),
    [
        (1, None, "a single text column needs a label column with integer classes"),
        (3, torch.zeros(4), r"must hold a list of 2 per row.*got labels of shape \[4\]"),
        (3, torch.zeros(4, 3), r"must hold a list of 2 per row.*got labels of shape \[4, 3\]"),
    ],
)
def test_labels_that_do_not_fit_the_columns_are_explained(model, columns, labels, message):
    with pytest.raises(ValueError, match=message):
        RankLoss(model)([features(model, TEXTS[:4])] * columns, labels)


def test_pairs_need_a_plain_loss(model):
    with pytest.raises(TypeError, match=r"pairs need a plain rank loss such as .*, got SiMix"):
        RankLoss(model, rg.SiMix(rg.RecallAtKLoss()))([features(model, TEXTS[:4])] * 2)


@pytest.mark.parametrize("loss", [rg.RecallAtKLoss(), rg.RamboAPLoss()], ids=["recall", "rambo"])
def test_a_cached_loss_has_the_gradient_of_the_whole_batch(model, loss):
    model.double()
    labels = torch.tensor(CLASSES)
    gradients = []
    for wrapped in (RankLoss(model, loss), CachedRankLoss(model, loss, mini_batch_size=5)):
        model.zero_grad()
        value = wrapped([features(model, TEXTS)], labels)
        value.backward()
        gradients.append((value.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (whole, expected), (cached, found) = gradients
    assert cached == pytest.approx(whole.item(), rel=1e-9)
    assert any(g.abs().max() > 0 for g in expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)


def test_balanced_batches_hold_as_many_texts_of_every_class():
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "label": [f"intent {c}" for c in CLASSES]})
    sampler = class_balanced(per_class=4)(dataset, 12, False, ["label", "labels"], seed=3)
    sampler.set_epoch(1)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 4
    for batch in batches:
        assert sorted(CLASSES[i] for i in batch) == sorted(4 * list({CLASSES[i] for i in batch}))
    assert sorted(i for batch in batches for i in batch) == list(range(48))
    sampler.set_epoch(2)
    assert list(sampler) != batches
    with pytest.raises(ValueError, match=r"must have a label column, one of 'label', got \['text'\]"):
        class_balanced()(datasets.Dataset.from_dict({"text": TEXTS}), 12, False, ["label"])


def test_the_evaluator_reports_what_evaluate_finds(model):
    evaluator = RetrievalEvaluator(TEXTS, CLASSES, name="test")
    metrics = evaluator(model)
    expected = rg.evaluate(embed(model, TEXTS).detach(), torch.tensor(CLASSES))
    assert evaluator.primary_metric == "test_mAP"
    assert metrics["test_mAP"] == pytest.approx(expected["mAP"], abs=1e-6)
    assert RetrievalEvaluator(TEXTS, [f"intent {c}" for c in CLASSES], name="test")(model) == metrics
    with pytest.raises(ValueError, match="of equal length, got 48 and 3"):
        RetrievalEvaluator(TEXTS, [0, 1, 2])
    with pytest.raises(ValueError, match="both ref_texts and ref_labels"):
        RetrievalEvaluator(TEXTS, CLASSES, TEXTS)


@pytest.mark.parametrize("cached", [False, True])
def test_training_with_the_trainer_improves_the_metric(model, tmp_path, cached):
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "label": CLASSES})
    evaluator = RetrievalEvaluator(TEXTS, CLASSES, name="train")
    before = evaluator(model)["train_mAP"]
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=8,
        per_device_train_batch_size=24,
        learning_rate=3e-3,
        batch_sampler=class_balanced(per_class=4),
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    loss = CachedRankLoss(model, mini_batch_size=10) if cached else RankLoss(model)
    SentenceTransformerTrainer(model, args=arguments, train_dataset=dataset, loss=loss).train()
    assert evaluator(model)["train_mAP"] > before + 0.05


@pytest.mark.parametrize(("columns", "grades"), [(2, None), (3, None), (3, [[2, 0], [0, 1], [1, 1], [0, 3], [1, 0], [2, 1]])])
def test_a_cached_loss_takes_pairs_and_graded_lists_too(model, columns, grades):
    model.double()
    texts = [features(model, TEXTS[start::8]) for start in range(columns)]
    labels = None if grades is None else torch.tensor(grades)
    loss = rg.SmoothAPLoss(tau=0.1) if grades is None else rg.RankLoss(rg.Sigmoid(0.1), rg.NDCG())
    found = []
    for wrapped in (RankLoss(model, loss), CachedRankLoss(model, loss, mini_batch_size=4)):
        model.zero_grad()
        value = wrapped(texts, labels)
        value.backward()
        found.append((value.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    for whole, cached in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(cached, whole, rtol=1e-6, atol=1e-12)


def test_the_model_card_names_the_loss_and_its_papers(model, tmp_path):
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "label": CLASSES})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=12, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    SentenceTransformerTrainer(model, args=arguments, train_dataset=dataset, loss=RankLoss(model, rg.SmoothAPLoss())).train()
    model.save_pretrained(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "RankLoss" in card
    assert "SmoothAPLoss" in card
    assert "@inproceedings" in card


def test_a_loss_that_is_not_wrapped_is_explained(model):
    with pytest.raises(TypeError, match=r"SmoothAPLoss: .* tokenized texts .*sentence_transformers.RankLoss\(model, loss\)"):
        rg.SmoothAPLoss()([features(model, TEXTS[:4])], torch.tensor([0, 0, 1, 1]))
