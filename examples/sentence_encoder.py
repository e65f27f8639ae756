"""Fine-tune a sentence encoder on labelled texts with a rank loss.

    pip install 'rankgrad[sentence-transformers]'
    python examples/sentence_encoder.py --model sentence-transformers/all-MiniLM-L6-v2 --csv texts.csv

Without arguments a tiny random BERT learns a few made-up support questions, to show that everything fits together.
"""

import argparse
import csv
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import modules
from transformers import BertConfig, BertModel, BertTokenizerFast

import rankgrad as rg
from rankgrad.integrations.sentence_transformers import CachedRankLoss, RetrievalEvaluator, class_balanced

TOPICS = ["lost card", "wrong balance", "late transfer", "blocked pin", "high fee", "new limit"]
FRAMES = ["help with {}", "i have a {}", "{} again", "what about the {}", "please fix {}", "there is a {} today"]


def tiny_model(folder: Path) -> SentenceTransformer:
    words = sorted({word for text in (*TOPICS, *FRAMES) for word in text.split()} - {"{}"})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=5 + len(words), **sizes)).save_pretrained(folder)
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    transformer = modules.Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, modules.Pooling(transformer.get_embedding_dimension())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model of sentence-transformers")
    parser.add_argument("--csv", type=Path, help="a file with the columns text and label")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    if options.csv:
        with options.csv.open(newline="") as file:
            texts, names = zip(*((row["text"], row["label"]) for row in csv.DictReader(file)), strict=True)
    else:
        texts, names = zip(*((frame.format(topic), topic) for topic in TOPICS for frame in FRAMES), strict=True)
    classes = {name: number for number, name in enumerate(dict.fromkeys(names))}
    labels = [classes[name] for name in names]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = SentenceTransformer(options.model) if options.model else tiny_model(Path(folder))
        evaluator = RetrievalEvaluator(texts, labels)
        print(f"before: mAP {evaluator(model)['mAP']:.3f}")
        arguments = SentenceTransformerTrainingArguments(
            folder, num_train_epochs=options.epochs, per_device_train_batch_size=24, learning_rate=1e-3, report_to="none",
            batch_sampler=class_balanced(per_class=4), save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        data = Dataset.from_dict({"text": texts, "label": labels})
        loss = CachedRankLoss(model, rg.RecallAtKLoss(), mini_batch_size=8)
        SentenceTransformerTrainer(model, args=arguments, train_dataset=data, loss=loss).train()
        print(f"after:  mAP {evaluator(model)['mAP']:.3f}")


if __name__ == "__main__":
    main()
