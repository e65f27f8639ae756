"""A random BERT with a vocabulary of given words, as a folder of transformers and as a model of sentence-transformers."""

from pathlib import Path


def bert(folder: Path, texts, **sizes) -> None:
    """Writes model and tokenizer."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = sorted({word for text in texts for word in text.lower().split()} - {"{}"})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, **sizes}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=5 + len(words), **sizes)).save_pretrained(folder)
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


def sentence_encoder(folder: Path, texts, **sizes):
    """A `SentenceTransformer` with mean pooling on such a BERT."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    bert(folder, texts, **sizes)
    transformer = modules.Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, modules.Pooling(transformer.get_embedding_dimension())], device="cpu")
