"""The loop as a whole: what it writes, how it ends, what it refuses, what it does when memory or numbers fail."""

import dataclasses
import gc
import hashlib
import json
import math
import shutil
import signal
import time
import weakref

import pytest
import torch
from torch import nn
from train.tiny_loop import Vectors, batch, held_out, network, remembering

import rankgrad as rg
from rankgrad.train import loop
from rankgrad.train.checkpoints import CheckpointStore
from rankgrad.train.errors import NotFiniteError, TrainingError, describe_killed_worker, is_killed_worker
from rankgrad.train.loop import fit
from rankgrad.train.meters import NaNGuard, StepValues
from rankgrad.train.settings import TrainSettings
from rankgrad.train.state_file import state_bytes

QUIET = TrainSettings(epochs=2, lr=1e-2, log_every=1, metric="margin", keep=0)


def changed(**settings):
    return dataclasses.replace(QUIET, **settings)


def train(folder, settings=QUIET, *, model=None, loss=None, batches=None, **options):
    model = network() if model is None else model
    outcome = fit(
        model,
        rg.FastAPLoss() if loss is None else loss,
        Vectors() if batches is None else batches,
        settings,
        folder,
        **options,
    )
    return model, outcome


def entries(folder, kind=None):
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def by_hand(steps, *, length=5, lr=1e-2, clip=None):
    """The same training written plainly: Adam on whole batches, one after the other."""
    model, loss = network(dropout=0.0), rg.FastAPLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        _, images, labels = batch(step // length, step % length)
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("chunk_size", [0, 7, "auto"])
def test_it_trains_like_a_loop_written_by_hand(tmp_path, chunk_size):
    model, outcome = train(tmp_path, changed(clip=0.1, chunk_size=chunk_size), model=network(dropout=0.0))
    assert (outcome.reason, outcome.step, outcome.epoch) == ("finished", 10, 2)
    torch.testing.assert_close(flat(model), by_hand(10, clip=0.1), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(flat(model), by_hand(10), rtol=1e-4, atol=1e-6), "clipping must matter"


def test_the_callers_generator_is_left_alone(tmp_path):
    state = torch.get_rng_state()
    train(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_keeps_nothing_of_its_model(tmp_path):
    """Without a collection of garbage, which may be long after: on a GPU the next run needs the memory."""
    model = network()
    alive = weakref.ref(model)
    gc.disable()
    try:
        train(tmp_path, model=model)
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_the_seed_decides(tmp_path):
    runs = [flat(train(tmp_path / str(i), changed(seed=seed))[0]) for i, seed in enumerate((0, 0, 1))]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2]), "dropout must depend on the seed"


def test_a_run_without_checkpoints_ends_with_the_same_weights(tmp_path):
    options = {"evaluators": {"held out": held_out}, "select": "held out"}
    kept, _ = train(tmp_path / "kept", **options)
    model, outcome = train(tmp_path / "none", checkpoints=False, **options)
    assert torch.equal(flat(model), flat(kept))
    assert outcome.folder is None
    assert outcome.metrics["held out"]
    assert not list((tmp_path / "none" / "checkpoints").iterdir())
    assert not entries(tmp_path / "none", "checkpoint")
    with pytest.raises(ValueError, match="fit: a run without checkpoints cannot be resumed: use resume=False"):
        train(tmp_path / "none", checkpoints=False, resume=True)


def test_steps_end_a_run_in_the_middle_of_an_epoch(tmp_path):
    model, outcome = train(tmp_path, changed(epochs=0, steps=7), model=network(dropout=0.0))
    assert (outcome.reason, outcome.step, outcome.epoch) == ("finished", 7, 2)
    torch.testing.assert_close(flat(model), by_hand(7), rtol=1e-4, atol=1e-6)


def test_a_longer_run_continues_a_shorter_one_exactly(tmp_path):
    train(tmp_path / "a", changed(epochs=0, steps=7), loss=remembering())
    continued, _ = train(tmp_path / "a", changed(epochs=0, steps=12), loss=remembering(), resume=True)
    whole, _ = train(tmp_path / "b", changed(epochs=0, steps=12), loss=remembering())
    assert torch.equal(flat(continued), flat(whole))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_parameter_groups_keep_their_own_rates(tmp_path, optimizer):
    model = network()
    first = model[0].weight.detach().clone()
    groups = [{"params": model[0].parameters(), "lr": 1e-12}, {"params": model[3].parameters()}]
    train(tmp_path, changed(optimizer=optimizer, lr=1e-2), model=model, param_groups=groups)
    torch.testing.assert_close(model[0].weight.detach(), first)
    assert not torch.allclose(model[3].weight, network()[3].weight, atol=1e-4)


def test_the_journal_says_everything(tmp_path):
    train(
        tmp_path,
        changed(checkpoint_every=4),
        loss=remembering(),
        evaluators={"validation": held_out, "test": held_out},
        select="validation",
        description={"images": 24},
    )
    kinds = [entry["kind"] for entry in entries(tmp_path)]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    (start,) = entries(tmp_path, "start")
    assert start["settings"] == json.loads(json.dumps(changed(checkpoint_every=4).as_dict()))
    assert start["versions"]["torch"] == torch.__version__.partition("+")[0] or torch.__version__ in start["versions"]["torch"]
    assert start["hardware"]["device"] == "cpu"
    assert start["images"] == 24
    assert start["total_steps"] == 10
    steps = entries(tmp_path, "step")
    assert [entry["step"] for entry in steps] == list(range(1, 11))
    assert [entry["epoch"] for entry in steps] == [1] * 5 + [2] * 5
    wanted = {
        "loss",
        "lr",
        "images_per_second",
        "batch_R@1",
        "batch_mAP",
        "perfect",
        "pairs_with_gradient",
        "spread",
        "skipped",
    }
    assert all(wanted <= entry.keys() for entry in steps)
    evaluations = entries(tmp_path, "eval")
    assert [(entry["split"], entry["step"]) for entry in evaluations] == [
        ("validation", 5),
        ("test", 5),
        ("validation", 10),
        ("test", 10),
    ]
    assert evaluations[-1]["metrics"].keys() == {"R@1", "margin"}
    assert entries(tmp_path, "epoch")[1]["loss"] == pytest.approx(sum(entry["loss"] for entry in steps[5:]) / 5)
    assert {entry["step"] for entry in entries(tmp_path, "checkpoint")} >= {4, 8, 10}
    assert not entries(tmp_path, "warning")


def test_selection_on_test_is_labelled(tmp_path):
    _, outcome = train(tmp_path, evaluators={"test": held_out}, select="test")
    (warning,) = entries(tmp_path, "warning")
    assert "selected on 'test' and not on validation classes" in warning["message"]
    assert outcome.best["selected_on"] == "test"


def scripted(values):
    values = iter(values)
    return {"validation": lambda model: {"margin": next(values)}}


def test_best_and_early_stopping(tmp_path):
    evaluators = scripted([0.1, 0.3, 0.2, math.nan, 0.3, 0.9])
    _, outcome = train(tmp_path, changed(epochs=9, patience=3), evaluators=evaluators, select="validation")
    assert outcome.reason == "early stop"
    assert outcome.epoch == 5
    assert outcome.best["epoch"] == 2
    run = CheckpointStore(tmp_path / "checkpoints")
    assert run.pointer("best")["metrics"] == {"margin": 0.3}
    assert run.checkpoint("best").step == 10
    assert run.checkpoint("last").step == 25
    # two last and the best
    assert sorted(path.name for path in run.path.glob("step-*")) == ["step-00000010", "step-00000020", "step-00000025"]
    _, again = train(tmp_path, changed(epochs=9, patience=3), evaluators=evaluators, select="validation", resume=True)
    assert again.step == 25, "a run that stopped early stays stopped"


def test_evaluation_every_n_epochs_and_at_the_end(tmp_path):
    train(tmp_path, changed(epochs=5, evaluate_every=2), evaluators={"validation": held_out})
    assert [entry["epoch"] for entry in entries(tmp_path, "eval")] == [2, 4, 5]


class Signalling(Vectors):
    """Sends this process a signal while it makes a batch."""

    def __init__(self, number, at):
        super().__init__()
        self.number, self.at = number, at

    def iterate(self, start):
        for item in super().iterate(start):
            if (self.epoch, item[0]) == self.at:
                signal.raise_signal(self.number)
            yield item


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [(0, 2), (0, 4)])
def test_a_signal_ends_the_run_after_its_step(tmp_path, capsys, number, at):
    before = signal.getsignal(number)
    hint = "Continue with: rankgrad train --resume a"
    _, outcome = train(tmp_path / "a", batches=Signalling(number, at), loss=remembering(), resume_hint=hint)
    assert outcome.reason == "interrupted"
    assert outcome.step == at[1] + 1
    assert signal.getsignal(number) is before
    said = capsys.readouterr().err
    assert f"stopped by {number.name} after step {at[1] + 1} of 10" in said
    assert hint in said
    continued, _ = train(tmp_path / "a", loss=remembering(), resume=True)
    whole, _ = train(tmp_path / "b", loss=remembering())
    assert torch.equal(flat(continued), flat(whole))


def test_a_second_signal_ends_it_at_once(tmp_path):
    class Twice(Signalling):
        def iterate(self, start):
            for item in super().iterate(start):
                if (self.epoch, item[0]) == self.at:
                    signal.raise_signal(self.number)
                yield item

    # a job in the background of a shell inherits that SIGINT is ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, batches=Twice(signal.SIGINT, (0, 2)))
    finally:
        signal.signal(signal.SIGINT, before)


class Limited(nn.Module):
    """Has memory for a few images at a time; what fails may fail in the forward or in the backward pass."""

    def __init__(self, most, where="forward"):
        super().__init__()
        self.body, self.most, self.where, self.seen = network(), most, where, []

    def forward(self, images):
        self.seen.append(len(images))
        output = self.body(images)
        if len(images) > self.most:
            if self.where == "forward":
                raise torch.OutOfMemoryError("no memory left, said the test")
            if output.requires_grad:
                output.register_hook(self.fail)
        return output

    def fail(self, gradient):
        raise torch.OutOfMemoryError("no memory left, said the test")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_the_chunk_and_loses_nothing(tmp_path, where):
    limited, outcome = train(tmp_path / "a", model=Limited(6, where), loss=remembering())
    assert outcome.step == 10
    messages = [entry["message"] for entry in entries(tmp_path / "a", "warning")]
    assert [message.partition(": ")[2] for message in messages] == ["chunk_size 24 -> 12", "chunk_size 12 -> 6"]
    assert all("out of memory at step 1, which is repeated" in message for message in messages)
    whole, _ = train(tmp_path / "b", changed(chunk_size=6), loss=remembering())
    assert torch.equal(flat(limited), flat(whole)), "the same steps, and no batch remembered twice"
    resumed, _ = train(tmp_path / "a", changed(epochs=3), model=Limited(6, where), loss=remembering(), resume=True)
    assert max(resumed.seen) == 6, "the smaller chunk is remembered"


def test_out_of_memory_with_one_image_at_a_time(tmp_path):
    with pytest.raises(TrainingError, match=r"out of memory at step 1 with 24 images, even one image at a time.*no checkpoint"):
        train(tmp_path, model=Limited(0))
    assert entries(tmp_path, "end")[0]["reason"] == "error"


def test_out_of_memory_with_live_batch_norm(tmp_path):
    model = Limited(10)
    model.body = nn.Sequential(nn.BatchNorm1d(10), network())
    with pytest.raises(TrainingError, match=r"training mode \(body\.0, \.\.\.\) does not allow smaller chunks"):
        train(tmp_path, model=model)


class Spoiling(nn.Module):
    """A loss that goes wrong at one call."""

    def __init__(self, call, how):
        super().__init__()
        self.loss, self.left, self.how = rg.FastAPLoss(), call, how

    def forward(self, embeddings, labels):
        self.left -= 1
        value = self.loss(embeddings, labels)
        if self.left:
            return value
        if self.how == "loss":
            return value * math.nan
        embeddings.register_hook(lambda gradient: gradient * math.inf)
        return value


@pytest.mark.parametrize(("how", "what"), [("loss", "the loss is nan"), ("gradient", "the gradient norm is (nan|inf)")])
def test_a_number_that_is_none_stops_the_run(tmp_path, how, what):
    model = network()
    with pytest.raises(
        TrainingError, match=rf"step 8: {what}; the batch was images .* last checkpoint is .*step-00000005"
    ) as caught:
        train(tmp_path, model=model, loss=Spoiling(8, how))
    listed = ", ".join(map(str, batch(1, 2)[0].tolist()))
    assert listed in str(caught.value)
    assert torch.isfinite(flat(model)).all(), "on the CPU the bad step is not taken"
    assert CheckpointStore(tmp_path / "checkpoints").checkpoint("last").step == 5
    assert entries(tmp_path, "end")[0]["reason"] == "error"


def test_float16_skips_overflowing_steps_but_not_for_ever(tmp_path):
    settings = changed(epochs=0, steps=60, precision="fp16", checkpoint_every=1000)
    model, outcome = train(tmp_path / "a", settings, loss=Spoiling(3, "gradient"))
    assert outcome.step == 60
    assert torch.isfinite(flat(model)).all()
    scales = [entry["scale"] for entry in entries(tmp_path / "a", "step")]
    assert scales[2] == scales[1] / 2

    def always(embeddings, labels):
        embeddings.register_hook(lambda gradient: gradient * math.inf)
        return rg.FastAPLoss()(embeddings, labels)

    with pytest.raises(TrainingError, match=r"gradients overflow float16 at every step .* bf16 or float32"):
        train(tmp_path / "b", settings, loss=always)
    with pytest.raises(TrainingError, match="step 3: the loss is nan"):
        train(tmp_path / "c", settings, loss=Spoiling(3, "loss"))


def test_float16_resumes_exactly(tmp_path):
    for steps in (4, 9):
        continued, _ = train(tmp_path / "a", changed(epochs=0, steps=steps, precision="fp16"), resume=steps == 9)
    whole, _ = train(tmp_path / "b", changed(epochs=0, steps=9, precision="fp16"))
    assert torch.equal(flat(continued), flat(whole))
    for steps in (4, 6):
        settings = changed(epochs=0, steps=steps, precision="fp16")
        train(tmp_path / "c", settings, loss=Spoiling(3 if steps == 4 else 99, "gradient"), resume=steps == 6)
    scales = [entry["scale"] for entry in entries(tmp_path / "c", "step")]
    assert scales[2:] == [scales[1] / 2] * 4, "the scale is part of a checkpoint"


def test_bf16_and_channels_last_train(tmp_path):
    class Images(Vectors):
        def iterate(self, start):
            for step, indices, images, labels in super().iterate(start):
                yield step, indices, images[:, :, None, None].expand(-1, -1, 4, 4), labels

    formats = []

    class Watching(nn.Conv2d):
        def forward(self, images):
            formats.append(images.is_contiguous(memory_format=torch.channels_last))
            output = super().forward(images)
            assert output.dtype == torch.bfloat16
            return output

    model = nn.Sequential(Watching(10, 4, 3), nn.Flatten())
    _, outcome = train(tmp_path, changed(precision="bf16", channels_last=True, chunk_size=7), model=model, batches=Images())
    assert outcome.step == 10
    assert all(formats)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_compile_is_asked_for(tmp_path, monkeypatch):
    compiled = []

    def noted(self):
        compiled.append(self)

    monkeypatch.setattr(nn.Module, "compile", noted)
    model, _ = train(tmp_path, changed(compile=True))
    assert compiled == [model]


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"select": "validation"}, r"select must be one of the evaluators \[\], got 'validation'"),
        ({"patience": 2}, {}, "patience needs select"),
        ({}, {"batches": Vectors(0)}, "at least one batch, got none"),
        (
            {"metric": "mAP"},
            {"evaluators": {"v": held_out}, "select": "v"},
            r"metric must be one of \['R@1', 'margin'\].*'mAP'",
        ),
        ({"warmup_steps": 10}, {}, "warm-up must be shorter than the run of 10 steps, got 10"),
        ({}, {"param_groups": [{"params": []}]}, "at least one parameter that requires a gradient"),
    ],
)
def test_says_what_is_wrong(tmp_path, settings, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, changed(**settings), **options)


def test_batches_that_break_their_promise(tmp_path):
    class Empty(Vectors):
        def iterate(self, start):
            return iter(())

    with pytest.raises(ValueError, match="promised 5 steps per epoch and gave none from step 0"):
        train(tmp_path, batches=Empty())


class TestResuming:
    def test_a_run_is_not_overwritten(self, tmp_path):
        train(tmp_path)
        with pytest.raises(ValueError, match=r"already holds a run \(the last checkpoint is .*step-00000010\): resume it"):
            train(tmp_path)

    def test_a_run_that_died_before_its_first_checkpoint_may_begin_again(self, tmp_path):
        with pytest.raises(TrainingError, match="step 3"):
            train(tmp_path, loss=Spoiling(3, "loss"))
        train(tmp_path)
        assert [entry["step"] for entry in entries(tmp_path, "step")] == list(range(1, 11))

    def test_without_a_checkpoint_it_begins(self, tmp_path):
        model, _ = train(tmp_path / "a", resume=True)
        assert "the run starts from the beginning" in entries(tmp_path / "a", "warning")[0]["message"]
        assert torch.equal(flat(model), flat(train(tmp_path / "b")[0]))

    @pytest.mark.parametrize(
        ("settings", "options", "difference"),
        [
            ({"lr": 2e-2}, {}, r"lr was 0\.01 and is 0\.02"),
            ({"epochs": 1}, {}, "epochs was 2 and is 1"),
            ({"seed": 3, "clip": 1.0}, {}, r"clip was 0\.0 and is 1\.0; seed was 0 and is 3"),
            ({}, {"batches": Vectors(6)}, "steps_per_epoch was 5 and is 6"),
            ({}, {"identity": {"data": "cars"}}, "data was 'sop' and is 'cars'"),
            ({}, {"loss": rg.SmoothAPLoss()}, "loss was 'FastAPLoss' and is 'SmoothAPLoss'"),
            ({}, {"model": nn.Linear(10, 3)}, "parameters was '4 tensors"),
        ],
    )
    def test_another_run_is_not_continued(self, tmp_path, settings, options, difference):
        train(tmp_path, identity={"data": "sop"})
        with pytest.raises(ValueError, match=rf"was started differently \(.*{difference}.*\): resume with the settings"):
            train(tmp_path, changed(**settings), **{"identity": {"data": "sop"}, **options}, resume=True)

    def test_groups_are_told_where_no_setting_tells(self, tmp_path):
        train(tmp_path)
        with pytest.raises(ValueError, match=r"started differently \(lr was 0\.01 and is 0\.02\): resume"):
            train(tmp_path, changed(lr=2e-2), resume=True)
        model, told = network(), r"\(parameter groups were 4 tensors \(lr 0\.01, weight decay 0\) and are 1 tensor \(lr 0\.5"
        groups = [{"params": [p], "lr": 0.5} for p in model.parameters()]
        with pytest.raises(ValueError, match=told):
            train(tmp_path, model=model, param_groups=groups, resume=True)

    def test_a_warm_up_that_was_cut_is_that_of_another_run(self, tmp_path):
        train(tmp_path, changed(epochs=1, warmup_epochs=1.0))
        with pytest.raises(ValueError, match="epochs was 1 and is 2"):
            train(tmp_path, changed(epochs=2, warmup_epochs=1.0), resume=True)
        with pytest.raises(
            ValueError, match=r"\(epochs was 1 and is 4; warmup_steps was 0 and is 9; warmup_epochs was 1.0 and is 0.0\)"
        ):
            train(tmp_path, changed(epochs=4, warmup_steps=9), resume=True)
        train(tmp_path / "whole", changed(epochs=2, warmup_epochs=1.0))
        train(tmp_path / "whole", changed(epochs=3, warmup_epochs=1.0), resume=True)

    def test_a_stretched_cosine_is_another_run(self, tmp_path):
        train(tmp_path, changed(schedule="cosine"))
        with pytest.raises(ValueError, match="epochs was 2 and is 3"):
            train(tmp_path, changed(schedule="cosine", epochs=3), resume=True)

    @pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: rg.EmbeddingMemory(loss, 1)])
    def test_a_temperature_that_would_begin_again_is_another_run(self, tmp_path, wrap):
        def scheduled(last):
            return wrap(rg.SmoothAPLoss(0.1, tau_end=last))

        train(tmp_path / "a", loss=scheduled(0.01))
        with pytest.raises(ValueError, match=r"epochs was 2 and is 3\): .*; to train it for longer, start a new run from its"):
            train(tmp_path / "a", changed(epochs=3), loss=scheduled(0.01), resume=True)
        # as long as it was
        train(tmp_path / "a", loss=scheduled(0.01), resume=True)
        # without a schedule, or with one that does not change anything
        for name, last in (("b", None), ("c", 0.1)):
            train(tmp_path / name, loss=scheduled(last))
            _, outcome = train(tmp_path / name, changed(epochs=3), loss=scheduled(last), resume=True)
            assert outcome.step == 15

    def test_a_learned_temperature_does_not_depend_on_the_length(self, tmp_path):
        train(tmp_path, loss=rg.SmoothAPLoss(0.1, learn_tau=True))
        _, outcome = train(tmp_path, changed(epochs=3), loss=rg.SmoothAPLoss(0.1, learn_tau=True), resume=True)
        assert outcome.step == 15

    def test_a_loss_of_ones_own_that_follows_the_progress_is_not_stretched(self, tmp_path):
        class Following(nn.Module):
            def set_progress(self, done):
                self.done = done

            def forward(self, embeddings, labels):
                return (1 + self.done) * rg.FastAPLoss()(embeddings, labels)

        train(tmp_path, loss=Following())
        with pytest.raises(ValueError, match="epochs was 2 and is 3"):
            train(tmp_path, changed(epochs=3), loss=Following(), resume=True)

    def test_what_does_not_matter_may_change(self, tmp_path):
        train(tmp_path)
        _, outcome = train(tmp_path, changed(epochs=3, log_every=3, checkpoint_every=4, chunk_size=5, keep=1), resume=True)
        assert outcome.step == 15

    def test_a_finished_run_stays_finished(self, tmp_path):
        first, _ = train(tmp_path)
        again, outcome = train(tmp_path, resume=True)
        assert (outcome.reason, outcome.step) == ("finished", 10)
        assert torch.equal(flat(first), flat(again))

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no pointer"])
    def test_a_damaged_checkpoint_is_passed_over(self, tmp_path, damage):
        whole, _ = train(tmp_path, loss=remembering())
        last = tmp_path / "checkpoints" / "step-00000010"
        file = last / ("weights.safetensors" if damage == "flipped" else "state.safetensors")
        content = file.read_bytes()
        if damage == "truncated":
            file.write_bytes(content[: len(content) // 2])
        elif damage == "flipped":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif damage == "missing":
            file.unlink()
        else:
            (tmp_path / "checkpoints" / "last.json").write_text("{")
        again, outcome = train(tmp_path, loss=remembering(), resume=True)
        assert outcome.step == 10
        assert torch.equal(flat(whole), flat(again))
        warnings = [entry["message"] for entry in entries(tmp_path, "warning")]
        if damage == "no pointer":
            assert not warnings
        else:
            assert warnings[0].startswith(f"skipped a damaged checkpoint: step-00000010: {file.name}")

    def test_a_checkpoint_that_last_did_not_name_is_made_again(self, tmp_path):
        train(tmp_path)
        run = CheckpointStore(tmp_path / "checkpoints")
        # as if the run had been killed between the rename of step 10 and its pointer
        (run.path / "last.json").write_text(json.dumps({"folder": "step-00000005", "step": 5}))
        train(tmp_path, batches=Signalling(signal.SIGINT, (1, 1)), resume=True)
        assert sorted(path.name for path in run.path.glob("step-*")) == ["step-00000005", "step-00000007"]

    def test_pruning_that_a_kill_cut_short_is_made_up_for(self, tmp_path):
        evaluators, run = {"validation": held_out}, CheckpointStore(tmp_path / "checkpoints")
        train(tmp_path, evaluators=evaluators, select="validation")
        before, best = sorted(run.path.iterdir()), run.pointer("best")
        shutil.copytree(run.path / "step-00000005", run.path / "step-00000003")
        (run.path / "best.json").write_text(json.dumps({**best, "folder": "step-00000003"}))
        train(tmp_path, evaluators=evaluators, select="validation", resume=True)
        assert sorted(run.path.iterdir()) == before
        assert run.pointer("best") == best

    def test_no_good_checkpoint_is_an_error(self, tmp_path):
        train(tmp_path)
        for file in tmp_path.glob("checkpoints/step-*/state.safetensors"):
            file.write_bytes(b"")
        with pytest.raises(
            TrainingError, match=r"no readable checkpoint \(step-00000010: state.safetensors has 0 bytes.*step-00000005"
        ):
            train(tmp_path, resume=True)


def test_numbers_that_are_still_on_their_way_are_looked_at_before_a_checkpoint():
    guard = NaNGuard(late=False, gradients=True)
    guard._pending.append(StepValues(3, torch.tensor([7, 8]), torch.tensor([math.inf, 1.0]), None))
    with pytest.raises(NotFiniteError, match="step 3: the loss is inf; the batch was images 7, 8"):
        guard.flush()


class NaNWeights(nn.Module):
    """Its weights become NaN at one pass, as after a step that was too long."""

    def __init__(self, call):
        super().__init__()
        self.body, self.left = network(dropout=0.0), call

    def forward(self, images):
        self.left -= 1
        output = self.body(images)
        return output * math.nan if self.left == 0 else output


LOSSES = [
    rg.FastAPLoss, rg.RecallAtKLoss, rg.SmoothAPLoss, rg.RamboAPLoss, rg.RamboRecallLoss,
    lambda: rg.SiMix(rg.RecallAtKLoss()), remembering, lambda: rg.RankLoss(rg.Sigmoid(0.1), rg.NDCG()),
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_embeddings_that_are_nan_stop_the_run_with_any_loss_and_name_the_batch(tmp_path, loss):
    batches = Vectors()
    batches.item_names = [f"class/{i}.jpg" for i in range(1000)]
    with pytest.raises(
        TrainingError, match=r"step 3: .* (is|are) (nan|inf|NaN).*the batch was images class/\d+\.jpg, .* and 14 more"
    ):
        train(tmp_path, model=NaNWeights(3), loss=loss(), batches=batches)
    assert entries(tmp_path, "end")[0]["reason"] == "error"


def test_a_loss_that_fails_on_nan_is_explained_by_the_embeddings(tmp_path):
    def strict(embeddings, labels):
        if not embeddings.isfinite().all():
            raise IndexError("index -9223372036854775808 is out of bounds")
        return embeddings.square().mean()

    with pytest.raises(TrainingError, match=r"step 3: the embeddings are NaN or infinite; the batch was images \d+, "):
        train(tmp_path, model=NaNWeights(3), loss=strict)


class KilledWorker(Vectors):
    """The process that loads the last batch of the first epoch is killed, as torch's handler of SIGCHLD tells it."""

    message = "DataLoader worker (pid 4021) is killed by signal: Killed. "

    def iterate(self, start):
        for found in super().iterate(start):
            if found[0] + 1 == len(self):
                raise RuntimeError(self.message)
            yield found


def test_a_worker_that_was_killed_is_one_sentence_with_the_way_on(tmp_path):
    with pytest.raises(
        TrainingError,
        match=r"^a process that loads images has ended \(process 4021, killed by signal: Killed\), most often for lack of "
        r"memory: use fewer --workers\. The run stops; the last checkpoint is .*step-00000003\. Continue with fit",
    ):
        train(tmp_path, changed(checkpoint_every=3), batches=KilledWorker())
    assert "process 4021" in entries(tmp_path, "end")[0]["message"]
    train(tmp_path, changed(checkpoint_every=3), resume=True)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("(pid(s) 12, 13) exited unexpectedly", "process 12, 13, exited unexpectedly"),
        (
            "(pid 12) exited unexpectedly with exit code 1. Details are lost. ",
            "process 12, exited unexpectedly with exit code 1",
        ),
        ("(pid 12) is killed by signal: Bus error. It is possible that ", "process 12, killed by signal: Bus error"),
    ],
)
def test_whatever_torch_says_of_a_worker(message, told):
    error = RuntimeError(f"DataLoader worker {message}")
    assert is_killed_worker(error)
    assert describe_killed_worker(error).startswith(f"a process that loads images has ended ({told}), most often")
    assert not is_killed_worker(RuntimeError("Pin memory thread exited unexpectedly"))
    assert not is_killed_worker(ValueError(str(error)))


class CPUShort(Limited):
    """Says so as the CPU's allocator does."""

    def forward(self, images):
        if len(images) > self.most:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                               "tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)")  # fmt: skip
        return super().forward(images)


def test_out_of_memory_on_a_cpu_halves_the_chunk_too(tmp_path):
    _, outcome = train(tmp_path / "a", model=CPUShort(6))
    assert outcome.step == 10
    messages = [entry["message"].partition(": ")[2] for entry in entries(tmp_path / "a", "warning")]
    assert messages == ["chunk_size 24 -> 12", "chunk_size 12 -> 6"]
    with pytest.raises(TrainingError, match="even one image at a time"):
        train(tmp_path / "b", model=CPUShort(0))


def test_no_epochs_evaluate_and_save_the_untrained_model(tmp_path):
    untrained = network()
    model, outcome = train(tmp_path, changed(epochs=0), evaluators={"validation": held_out}, select="validation")
    assert (outcome.reason, outcome.step) == ("finished", 0)
    assert torch.equal(flat(model), flat(untrained))
    assert outcome.metrics["validation"]["margin"] == pytest.approx(held_out(model.eval())["margin"])
    assert CheckpointStore(tmp_path / "checkpoints").checkpoint("best").step == 0
    train(tmp_path, changed(epochs=0), evaluators={"validation": held_out}, select="validation", resume=True)
    assert len(entries(tmp_path, "checkpoint")) == 1


def test_a_finished_run_says_how_to_train_it_further(tmp_path, capsys):
    train(tmp_path, changed(schedule="cosine"))
    train(tmp_path, changed(schedule="cosine"), resume=True)
    assert "the run is finished after step 10. To train it further" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"epochs was 2 and is 3.*start a new run from its weights \(--weights RUN\)"):
        train(tmp_path, changed(schedule="cosine", epochs=3), resume=True)


class Lines:
    """Progress that is printed at every step."""

    def __init__(self, monkeypatch):
        self.notes = []
        monkeypatch.setattr("rankgrad.train.loop.Progress.advance", lambda progress, count=1, note="": self.notes.append(note))


def test_progress_shows_epoch_and_loss_of_every_step(tmp_path, monkeypatch):
    lines = Lines(monkeypatch)
    train(tmp_path / "a", changed(log_every=1))
    losses = [entry["loss"] for entry in entries(tmp_path / "a", "step")]
    lines.notes.clear()
    train(tmp_path / "b", changed(log_every=7))
    assert len(lines.notes) == 10
    for step, (note, loss) in enumerate(zip(lines.notes, losses, strict=True)):
        assert note.startswith(f"epoch {1 + step // 5}, loss {loss:.4f}, ")
        assert note.endswith(" images/s")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, r"has format 9, this version reads format 2: resume with the version"),
        ({"format": "x"}, r"has format 'x'"),
        ({"position": {"step": 12, "epoch": 2, "in_epoch": 2}}, r"it is at step 12, and the run ends after step 10"),
        ({"position": {"step": 10**9, "epoch": 2 * 10**8}}, r"at step 1000000000, and the run ends"),
        ({"position": {"step": 9}}, r"step 9 is not step 0 of epoch 3 with 5 steps per epoch"),
        ({"position": {"step": 5, "epoch": 1}}, r"it is of step 5"),
    ],
)
def test_a_state_that_no_run_can_have_is_refused(tmp_path, change, message):
    train(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = store.checkpoint().folder
    state = store.checkpoint().state()
    state["position"] |= change.pop("position", {})
    (folder / "state.safetensors").write_bytes(state_bytes({**state, **change}))
    sign(folder)
    with pytest.raises(ValueError, match=message):
        train(tmp_path, resume=True)


def sign(folder):
    """A manifest for files that were changed."""
    content = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    entries = {
        name: {"bytes": len(c), "blake2b": hashlib.blake2b(c, digest_size=16).hexdigest()} for name, c in content.items()
    }
    (folder / "manifest.json").write_text(json.dumps(entries))


def test_settings_that_a_later_version_adds_do_not_stand_in_the_way(tmp_path):
    train(tmp_path, changed(epochs=1), identity={"data": "sop"})
    train(tmp_path, identity={"data": "sop", "miner": ""}, resume=True)
    with pytest.raises(ValueError, match="miner was '' and is 'hard'"):
        train(tmp_path, identity={"data": "sop", "miner": "hard"}, resume=True)


@pytest.mark.parametrize(
    ("saved", "now", "difference"),
    [
        ({}, {"rho": 3.0}, r"rho was 100\.0 and is 3\.0"),
        ({"rho": 3.0}, {}, r"rho was 3\.0 and is 100\.0"),
        ({"rho": 3.0}, {"rho": 4.0}, r"rho was 3\.0 and is 4\.0"),
        ({}, {"columns": ("a", "c")}, r"columns was \['a', 'b'\] and is \['a', 'c'\]"),
    ],
)
def test_a_name_that_an_identity_leaves_out_has_its_default(tmp_path, saved, now, difference):
    defaults = {"rho": 100.0, "columns": ("a", "b")}
    train(tmp_path, changed(epochs=1), identity=saved, identity_defaults=defaults)
    with pytest.raises(ValueError, match=rf"was started differently \({difference}\)"):
        train(tmp_path, identity=now, identity_defaults=defaults, resume=True)
    _, outcome = train(tmp_path, identity={**defaults, **saved}, identity_defaults=defaults, resume=True)
    assert outcome.step == 10


def test_a_run_whose_state_was_pickled_is_continued_exactly(tmp_path):
    """As earlier versions wrote it, with their settings."""
    train(tmp_path / "a", changed(epochs=0, steps=7), loss=remembering())
    store = CheckpointStore(tmp_path / "a" / "checkpoints")
    folder = store.checkpoint().folder
    state = {**store.checkpoint().state(), "format": 1}
    state["settings"] |= {"tensorboard": "off", "wandb": ""}
    torch.save(state, folder / "state.pt")
    (folder / "state.safetensors").unlink()
    sign(folder)
    continued, _ = train(tmp_path / "a", changed(epochs=0, steps=12), loss=remembering(), resume=True)
    whole, _ = train(tmp_path / "b", changed(epochs=0, steps=12), loss=remembering())
    assert torch.equal(flat(continued), flat(whole))


def test_a_collapse_is_told_while_it_happens(tmp_path):
    def together(embeddings, labels):
        unit = nn.functional.normalize(embeddings, dim=1)
        return -(unit @ unit.t()).mean()

    train(tmp_path, changed(epochs=10, lr=3e-2), loss=together, model=network(dropout=0.0))
    (warning,) = entries(tmp_path, "warning")
    assert warning["message"].startswith("all embeddings fall together: the mean cosine between images is 0.9")
    assert warning["step"] < 50
    assert "--memory" not in warning["message"]


def test_a_collapse_with_a_memory_names_it(tmp_path):
    class Together(rg.EmbeddingMemory):
        def forward(self, embeddings, labels):
            super().forward(embeddings, labels)
            unit = nn.functional.normalize(embeddings, dim=1)
            return -(unit @ unit.t()).mean()

    train(tmp_path, changed(epochs=10, lr=3e-2), loss=Together(rg.FastAPLoss(), 1), model=network(dropout=0.0))
    (warning,) = entries(tmp_path, "warning")
    assert "try --memory 0" in warning["message"]


def test_diagnostics_do_not_change_training(tmp_path):
    often, _ = train(tmp_path / "a", changed(log_every=1), loss=remembering())
    never, _ = train(tmp_path / "b", changed(log_every=1000), loss=remembering())
    assert torch.equal(flat(often), flat(never))


def test_slow_checkpoints_are_not_written_after_every_epoch(tmp_path, monkeypatch):
    save, written = CheckpointStore.save, []

    def slow(self, *arguments, step, **details):
        written.append(step)
        time.sleep(0.05)
        return save(self, *arguments, step=step, **details)

    monkeypatch.setattr(CheckpointStore, "save", slow)
    train(tmp_path / "cheap", changed(epochs=4))
    assert written == [5, 10, 15, 20]
    monkeypatch.setattr(loop, "CHEAP_CHECKPOINT", 0.04)
    written.clear()
    train(tmp_path / "slow", changed(epochs=4))
    # the first, which tells the cost, and the last
    assert written == [5, 20]
