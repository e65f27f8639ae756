"""A state comes back exactly, and no file that is not one is taken for it or runs code."""

import os
import pickle

import pytest
import torch

from rankgrad.train.state_file import read_pickled_state, read_state, state_bytes


def same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert found.stride() == wanted.stride()
        assert torch.equal(found, wanted) or (found.isnan().all() and wanted.isnan().all())
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted


STATE = {
    "optimizer": {
        "state": {
            0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)},
            1: {"step": torch.tensor(3.0), "exp_avg": torch.randn(5, 2).t()},
        },
        "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None, "fused": True}],
    },
    "past": [(torch.zeros(0, 4), torch.arange(3)), (torch.full((2,), torch.nan), torch.ones(2, dtype=torch.bool))],
    "half": torch.randn(3).bfloat16(),
    "numbers": [1, 10**30, 1e-310, float("inf"), True, None, ""],
    "__tensor__": "a key that means something else",
    "empty": {},
    "names": {"\u00e9\n": 1},
}


def test_a_state_comes_back_exactly(tmp_path):
    path = tmp_path / "state.safetensors"
    path.write_bytes(state_bytes(STATE))
    same(read_state(path), STATE)
    assert state_bytes(read_state(path)) == state_bytes(STATE)


def test_tensors_that_share_memory_are_saved_each(tmp_path):
    whole = torch.arange(6.0)
    path = tmp_path / "state.safetensors"
    path.write_bytes(state_bytes({"whole": whole, "part": whole[2:4]}))
    same(read_state(path), {"whole": whole, "part": whole[2:4].clone()})


def test_what_cannot_be_saved_is_named():
    with pytest.raises(TypeError, match=r"state\.loss\.generator is a Generator, which a checkpoint cannot hold"):
        state_bytes({"loss": {"generator": torch.Generator()}})


class Malicious:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 100, pickle.dumps(Malicious()), state_bytes({"a": torch.ones(3)})[:-4], state_bytes({})[:20]],
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "state.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"state\.safetensors is not the state of a run"):
        read_state(path)


@pytest.mark.parametrize("encoded", ['{"__tensor__": "9"}', '{"__tuple__": 3}', '{"__items__": [1]}', "[" * 100_000])
def test_a_header_that_is_nonsense_is_refused(tmp_path, encoded):
    from safetensors.torch import save

    path = tmp_path / "state.safetensors"
    path.write_bytes(save({"0": torch.ones(2)}, metadata={"state": encoded}))
    with pytest.raises(ValueError, match="is not the state of a run"):
        read_state(path)


def test_a_pickle_with_code_is_refused_without_advice_to_run_it(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"loss": Malicious()}, path)
    with pytest.raises(ValueError, match="is not the state of a run") as caught:
        read_pickled_state(path)
    assert "weights_only" not in str(caught.value)
