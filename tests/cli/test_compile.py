"""`rankgrad compile`: the kernels of the training that the flags describe."""

import pytest
import torch

from rankgrad import cli
from rankgrad._dry_run import dry_run
from rankgrad._gpu import Gpu, as_if_on
from rankgrad.runs import retrieval_task


@pytest.fixture
def launched(monkeypatch):
    """By GPU, the kernels that would be compiled and their arguments."""
    pytest.importorskip("triton")
    found = {}

    def compile_kernels(call, gpu):
        launches = found[gpu] = []
        with as_if_on(Gpu.named(gpu, caller="")), dry_run(lambda kernel, _, given: launches.append((kernel.__name__, given))):
            call()
        return len(launches)

    monkeypatch.setattr(retrieval_task, "compile_kernels", compile_kernels)
    return found


def test_for_each_gpu_and_without_data(launched, capsys):
    assert cli.main(["compile", "--gpu", "h100", "--gpu", "8.0"]) == 0
    assert list(launched) == ["h100", "8.0"]
    for line, gpu in zip(capsys.readouterr().out.splitlines(), launched, strict=True):
        assert line.startswith(f"own-images: {len(launched[gpu])} kernels for {gpu} in ")


def test_the_loss_is_that_of_training(launched):
    state = torch.get_rng_state()
    settings = ["--loss", "fastap", "--memory", "64", "--dim", "24", "--precision", "bf16"]
    assert cli.main(["compile", "--gpu", "h100", *settings]) == 0
    gradients = [given for name, given in launched["h100"] if name == "backward_kernel"]
    assert {given["SYMMETRIC"] for given in gradients} == {True, False}, "first the batch alone, then with what is in memory"
    assert {given["SPLIT"] for given in gradients} == {False}, "autocast makes it fast"
    assert {given["D"] for given in gradients} == {64}, "operands are padded to a whole step"
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_and_crops_are_those_of_training(launched):
    assert cli.main(["compile", "--gpu", "h100", "--dim", "24", "--size", "32"]) == 0
    names = {name for name, _ in launched["h100"]}
    assert {"count_kernel", "scatter_kernel", "table_kernel", "crop_kernel"} <= names, "few and many relevant items, and images"
    exact = [given for name, given in launched["h100"] if name == "count_kernel" and not given["BOTH"]]
    assert {given["SPLIT"] for given in exact} == {True}, "an evaluation is in float32"
    crops = [given for name, given in launched["h100"] if name == "crop_kernel"]
    assert {given["CHANNELS_LAST"] for given in crops} == {True, False}, "of the network, and of an evaluation"
    assert {given["ROUNDED"] for given in crops} == {True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h101"], "rankgrad compile: there is no GPU 'h101' in the list: did you mean 'h100'?"),
        (["--gpu", "h100", "--dim", "0"], "rankgrad compile: own-images has the dimension of its network: give it with --dim"),
        (["--gpu", "h100", "--loss", "pml:TripletMarginLoss"], "is a loss of pytorch-metric-learning, which has no kernels"),
    ],
)
def test_what_cannot_be_compiled(arguments, message, capsys):
    assert cli.main(["compile", *arguments]) == 2
    assert message in capsys.readouterr().err
