"""Texts from the command line: the same pipeline with a sentence encoder, from a file of texts to a search."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tiny_encoder import bert

import rankgrad as rg
from rankgrad import cli
from rankgrad.models import ModelSpec, TextTokenizer, build_model
from rankgrad.models.text_trunks import build_text_trunk

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend

WORDS = ["card", "balance", "transfer", "pin", "fee", "limit", "rate", "loan"]
FRAMES = ["help with {}", "my {} again", "the {} please", "what {} is now", "new {} now", "{} lost"]
ROWS = [(frame.format(word), word) for word in WORDS for frame in FRAMES]
QUIET = ["--device", "cpu", "--no-tensorboard"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "bert"
    bert(folder, [*WORDS, *FRAMES])
    return folder


def write(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write(tmp_path_factory.mktemp("texts") / "texts.csv", ("text", "label"), ROWS)


def train(*arguments):
    return cli.main(["train", *map(str, arguments), *QUIET])


def weights(run):
    folder = json.loads((run / "checkpoints" / "last.json").read_text())["folder"]
    return (run / "checkpoints" / folder / "weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory, encoder, texts):
    out = tmp_path_factory.mktemp("runs") / "run"
    # chunks, so that dropout is replayed; a validation split by label
    settings = ("--schedule", "constant", "--warmup", 0, "--lr", 1e-2, "--chunk-size", 5, "--validation", "half")
    assert train("--data", texts, "--trunk", encoder, "--epochs", 2, "--evaluate-every", 1, "--out", out, *settings) == 0
    return out


def test_training_changes_the_encoder_and_is_journaled(run, encoder):
    model, plain = rg.load(run, "cpu"), build_text_trunk(str(encoder), pretrained=True)
    assert "texts, " in repr(model)
    after, before = model.model.trunk.state_dict(), plain.body.state_dict()
    assert set(after) == set(before)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    kinds = [json.loads(line)["kind"] for line in (run / "journal.jsonl").read_text().splitlines()]
    assert {"step", "eval"} <= set(kinds)
    result = json.loads((run / "eval" / "test" / "result.json").read_text())
    assert result["protocol"] == "all-vs-all"
    rows = list(csv.DictReader((run / "eval" / "test" / "table.csv").open()))
    assert {(row["text"], row["class"]) for row in rows} < set(ROWS)


def test_progress_counts_texts(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rankgrad._messages.BETWEEN_LINES", 0.0)
    shutil.copytree(run, tmp_path / "run")
    assert cli.main(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 0
    told = capsys.readouterr().err
    assert " texts" in told
    assert "image" not in told


def test_a_resumed_run_ends_like_one_that_was_never_stopped(run, encoder, texts, tmp_path):
    shutil.copytree(run, tmp_path / "whole")
    settings = ("--schedule", "constant", "--warmup", 0, "--lr", 1e-2, "--chunk-size", 5, "--validation", "half")
    parts = tmp_path / "parts"
    assert train("--data", texts, "--trunk", encoder, "--epochs", 1, "--evaluate-every", 1, "--out", parts, *settings) == 0
    assert weights(parts) != weights(run)
    assert train("--resume", parts, "--epochs", 2) == 0
    assert weights(parts) == weights(run)


def test_changed_texts_are_not_resumed(run, texts, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    other = write(tmp_path / "texts.csv", ("text", "label"), [(f"{text} x", label) for text, label in ROWS])
    assert train("--resume", tmp_path / "run", "--data", other, "--epochs", 3) == 2
    assert "the data has changed since" in capsys.readouterr().err


def test_chunks_have_the_gradient_of_the_whole_batch(encoder):
    model = build_model(ModelSpec(trunk=str(encoder), weights="default", layer_norm=False, dim=0, inputs="texts")).eval()
    tokenizer = TextTokenizer(str(encoder))
    tokens, labels = tokenizer.collate(tokenizer([text for text, _ in ROWS])), torch.arange(48) // 6
    loss = rg.SmoothAPLoss(tau=0.1)
    loss(model(tokens), labels).backward()
    whole = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    rg.LargeBatch(model, loss, chunk_size=7)(tokens, labels)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, whole[name], rtol=1e-4, atol=1e-6)


def test_padding_does_not_change_an_embedding(run):
    model = rg.load(run, "cpu")
    alone, among = model.embed("card lost"), model.embed(["what balance is now", "card lost"])
    np.testing.assert_allclose(alone, among[1], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(among, axis=1), 1, atol=1e-6)


def test_a_folder_of_sentence_transformers_gives_its_own_embeddings(tmp_path):
    pytest.importorskip("sentence_transformers")
    from tiny_encoder import sentence_encoder

    theirs = sentence_encoder(tmp_path / "plain", [*WORDS, *FRAMES])
    theirs.save(str(tmp_path / "saved"))
    spec = ModelSpec(trunk=str(tmp_path / "saved"), weights="default", layer_norm=False, dim=0, inputs="texts")
    tokenizer = TextTokenizer(str(tmp_path / "saved"))
    some = [text for text, _ in ROWS[:9]]
    with torch.no_grad():
        ours = build_model(spec).eval()(tokenizer.collate(tokenizer(some)))
    expected = theirs.eval().encode(some, convert_to_tensor=True, normalize_embeddings=True).cpu()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_texts_are_embedded_searched_and_labelled(run, texts, tmp_path, capsys):
    emb = tmp_path / "emb"
    assert cli.main(["embed", str(run), str(texts), "--out", str(emb), "--device", "cpu"]) == 0
    assert "Wrote 48 embeddings of 16 dimensions" in capsys.readouterr().out
    assert cli.main(["search", "card lost", "--index", str(emb), "-k", "1", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.split("\n")[1].split() == ["1", "1.0000", "card", "card", "lost"]
    assert cli.main(["predict", str(run), str(texts), "--gallery", str(emb), "-k", "3", "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 49
    model = rg.load(run, "cpu")
    (hit,) = model.search("pin lost", [text for text, _ in ROWS], k=1)
    assert (hit.text, hit.path) == ("pin lost", None)
    with pytest.raises(TypeError, match="texts must be strings"):
        model.embed([3])


@pytest.fixture(scope="module")
def gallery(run, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("galleries") / "emb"
    assert cli.main(["embed", str(run), str(texts), "--out", str(folder), "--device", "cpu"]) == 0
    return folder


def test_the_page_has_a_search_box_for_texts(run, gallery):
    testing = pytest.importorskip("starlette.testclient")
    from rankgrad.search.search_service import SearchService
    from rankgrad.search.searcher import Searcher
    from rankgrad.search.server import make_app

    service = SearchService(rg.load(run, "cpu"), Searcher.open(gallery))
    client = testing.TestClient(make_app(service, hosts=["testserver"]))
    assert client.get("/api/about").json()["of_texts"] is True
    found = client.get("/api/search", params={"text": "card lost", "k": 3}).json()
    assert found["results"][0]["text"] == "card lost"
    assert client.get("/api/search", params={"item": 0, "k": 2}).json()["query"]["text"] == ROWS[0][0]
    assert client.get("/api/search", params={"text": " "}).status_code == 400
    assert client.get("/thumb/0").status_code == 404
    assert 'id="ask-text"' in client.get("/").text


def test_a_report_shows_texts_in_place_of_pictures(run, tmp_path):
    assert cli.main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    rows = list(csv.DictReader((run / "eval" / "test" / "table.csv").open()))
    assert f'class="frame text" title="{rows[0]["text"]}, {rows[0]["class"]}"' in page or any(
        f">{row['text']}</span>" in page for row in rows
    )
    assert "could not be read" not in page
    assert '"of_texts":true' in page


def test_near_duplicates_are_listed_by_their_text(gallery, tmp_path):
    assert cli.main(["duplicates", str(gallery), "--out", str(tmp_path), "--threshold", "0.5"]) == 0
    assert next(csv.reader((tmp_path / "duplicates.csv").open()))[1] == "text"


def test_a_debug_run_and_a_check_of_the_data(encoder, texts, tmp_path, capsys):
    assert train("--data", texts, "--trunk", encoder, "--debug", "--out", tmp_path / "run") == 0
    capsys.readouterr()
    assert cli.main(["check-data", "texts", str(texts)]) == 0
    assert "all-vs-all" in capsys.readouterr().out


def test_pairs_are_tested_as_queries_among_the_positives(encoder, tmp_path):
    pairs = [(ROWS[i][0], ROWS[i + 1][0]) for i in range(0, 48, 2)]
    # an anchor with two positives is one query
    file = write(tmp_path / "pairs.csv", ("question", "answer"), [*pairs, (pairs[0][0], "card card")])
    arguments = ("--pair-columns", "question,answer", "--epochs", 1, "--warmup", 0, "--out", tmp_path / "run")
    assert train("--data", file, "--trunk", encoder, *arguments) == 0
    rows = list(csv.DictReader((tmp_path / "run" / "eval" / "test" / "table.csv").open()))
    assert sum(row["is_query"] == "1" for row in rows) == 12
    assert all((row["is_query"] == "1") != (row["is_gallery"] == "1") for row in rows)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["name"] == "own-pairs"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_other_files_of_texts_are_read_alike(kind, encoder, tmp_path, capsys):
    place = tmp_path / f"texts.{kind}"
    if kind == "jsonl":
        place.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS))
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow as pa

        parquet.write_table(pa.table({"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]}), place)
    else:
        datasets = pytest.importorskip("datasets")
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=WORDS)})
        content = {"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]}
        datasets.Dataset.from_dict(content, features=features).save_to_disk(str(place))
    assert train("--data", place, "--trunk", encoder, "--epochs", 1, "--warmup", 0, "--out", tmp_path / "run") == 0
    rows = list(csv.DictReader((tmp_path / "run" / "eval" / "test" / "table.csv").open()))
    assert {(row["text"], row["class"]) for row in rows} < set(ROWS)


def test_a_saved_dataset_of_images_is_trained_on(tmp_path):
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    pictures = [image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)) for _ in range(32)]
    content = {"image": pictures, "label": [f"c{i // 4}" for i in range(32)]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    whole = datasets.Dataset.from_dict(content, features=features)
    parts = {"train": whole.select(range(16)), "test": whole.select(range(16, 32))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    arguments = ("--data", tmp_path / "saved", "--debug", "--out", tmp_path / "run", "--cache", "none")
    assert train(*arguments) == 0
    rows = list(csv.DictReader((tmp_path / "run" / "eval" / "test" / "table.csv").open()))
    assert {row["class"] for row in rows} == {"c4", "c5", "c6", "c7"}


def _no_tokenizer(encoder, tmp_path):
    shutil.copytree(encoder, tmp_path / "bare", ignore=shutil.ignore_patterns("token*", "vocab*", "special*"))
    return tmp_path / "bare"


@pytest.mark.parametrize(
    ("header", "rows", "flags", "message"),
    [
        (("text", "class"), ROWS, (), "must have the columns text and label"),
        (("text", "label"), [], (), "has no rows"),
        (("text", "label"), [("", "card"), *ROWS], (), "texts.csv:2: text is empty"),
        (("text", "label"), [("card", "card", "x"), *ROWS], (), "2 columns expected"),
        (("text", "label", "split"), [("card", "card", "dev-set")], (), "split must be one of train, validation, test"),
        (("text", "label"), ROWS, ("--max-length", 9999), "--max-length must be at most 512"),
        (("text", "label"), ROWS, ("--size", 64), "--size is for images, and the data are texts"),
        (("text", "label"), ROWS, ("--pair-columns", "text"), "--pair-columns must be two names"),
    ],
)
def test_bad_texts_and_settings_are_explained(header, rows, flags, message, encoder, tmp_path, capsys):
    file = write(tmp_path / "texts.csv", header, rows)
    assert train("--data", file, "--trunk", encoder, "--out", tmp_path / "run", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_bad_encoders_are_explained(encoder, texts, tmp_path, capsys):
    bare = _no_tokenizer(encoder, tmp_path)
    assert train("--data", texts, "--trunk", bare, "--out", tmp_path / "run") == 2
    assert "has no tokenizer" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert train("--data", texts, "--trunk", tmp_path / "empty", "--out", tmp_path / "run") == 2
    assert "empty is not a sentence encoder" in capsys.readouterr().err
    assert train("--data", texts, "--trunk", tmp_path / "absent", "--out", tmp_path / "run") == 2
    assert "absent of the sentence encoder does not exist" in capsys.readouterr().err
    shutil.copytree(encoder, tmp_path / "dense")
    (tmp_path / "dense" / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "x.Dense"}]))
    assert train("--data", texts, "--trunk", tmp_path / "dense", "--out", tmp_path / "run") == 2
    assert "has a module Dense, which is not supported" in capsys.readouterr().err


def test_the_encoder_is_exported_for_sentence_transformers(run, tmp_path, capsys):
    library = pytest.importorskip("sentence_transformers")
    out = tmp_path / "out"
    assert cli.main(["export", str(run), "--out", str(out)]) == 0
    texts = ["card lost", "what balance is now"]
    found = library.SentenceTransformer(str(out), device="cpu").encode(texts)
    np.testing.assert_allclose(found, rg.load(run, "cpu").embed(texts), atol=1e-5)
    capsys.readouterr()
    assert cli.main(["export", str(run), "--format", "onnx", "--out", str(tmp_path / "x")]) == 2
    assert "a run on texts is written as sentence-transformers" in capsys.readouterr().err


def test_further_layers_are_exported_too(encoder, texts, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    settings = ("--epochs", 1, "--warmup", 0, "--dim", 6, "--layer-norm", "--out", tmp_path / "run")
    assert train("--data", texts, "--trunk", encoder, *settings) == 0
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    found = library.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(["card lost"])
    assert found.shape == (1, 6)
    np.testing.assert_allclose(found[0], rg.load(tmp_path / "run", "cpu").embed("card lost"), atol=1e-5)


def test_a_card_goes_with_the_folder_of_a_text_model(run, tmp_path, capsys):
    library, hub = pytest.importorskip("sentence_transformers"), pytest.importorskip("huggingface_hub")
    assert cli.main(["card", str(run)]) == 0
    assert "# run" in capsys.readouterr().out
    folder = tmp_path / "intents-model"
    assert cli.main(["card", str(run), "--out", str(folder), "--license", "apache-2.0"]) == 0
    card = hub.ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag, card.data.license) == (
        "sentence-transformers",
        "sentence-similarity",
        "apache-2.0",
    )
    assert {"R@1", "mAP"} <= {result.metric_name.split()[0] for result in card.data.eval_results}
    for part in (
        "Protocol **all-vs-all**",
        "95% interval",
        "rankgrad train",
        "the dot product of two vectors",
        "SentenceTransformer(",
    ):
        assert part in card.text
    assert "image" not in card.text
    assert str(run.parent) not in card.content
    found = library.SentenceTransformer(str(folder), device="cpu").encode(["card lost"])
    np.testing.assert_allclose(found[0], rg.load(run, "cpu").embed("card lost"), atol=1e-5)


def test_a_text_model_does_not_embed_images(run, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert cli.main(["embed", str(run), "--data", f"folder:{tmp_path}", "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert cli.main(["embed", str(run), str(tmp_path / "a.csv"), "--device", "cpu"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_two_processes_compute_what_one_does(encoder, texts, capfd):
    command = ["check-equivalence", "--data", str(texts), "--trunk", str(encoder), "--processes", "2", "--warmup", "0"]
    assert cli.main(command) == 0
    assert "they agree" in capfd.readouterr().out
