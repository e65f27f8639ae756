"""GeM against its definition, where the definition can be computed and where it overflows."""

import pytest
import torch

from rankgrad.models.pooling import First, GeM, Maximum, Mean


def plain(features, p, eps=1e-6):
    return features.clamp(min=eps).pow(p).mean(dim=-1).pow(1 / p)


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0, 6.0])
def test_gem_is_its_definition(p):
    torch.manual_seed(0)
    features = torch.randn(4, 5, 9, dtype=torch.float64)
    torch.testing.assert_close(GeM(p).double()(features), plain(features, p))


def test_gem_runs_from_the_mean_to_the_maximum():
    features = torch.rand(4, 5, 9) + 0.1
    torch.testing.assert_close(GeM(1.0)(features), Mean()(features))
    torch.testing.assert_close(GeM(1000.0)(features), Maximum()(features), rtol=5e-3, atol=0)


def test_the_gradient_is_the_derivative_in_features_and_exponent():
    torch.manual_seed(0)
    features = (torch.rand(2, 3, 4, dtype=torch.float64) + 0.1).requires_grad_()
    gem = GeM(2.5).double()
    assert torch.autograd.gradcheck(gem, features)
    p = gem.p
    assert torch.autograd.gradcheck(lambda p: torch.func.functional_call(gem, {"p": p}, features.detach()), p)


@pytest.mark.parametrize("p", [3.0, 8.0, 40.0])
def test_no_exponent_over_or_underflows(p):
    # a channel without activation, one of large ones, an ordinary one
    values = torch.tensor([[[-1.0, 0.0, -3.0], [1e6, 3e6, 2e6], [0.5, 1.0, 0.0]]])
    features = values.clone().requires_grad_()
    gem = GeM(p)
    result = gem(features)
    torch.testing.assert_close(result.double(), plain(values.double(), p), rtol=1e-4, atol=1e-12)
    result.sum().backward()
    assert torch.isfinite(features.grad).all()
    assert torch.isfinite(gem.p.grad).all()
    if p > 7:
        # what the definition itself does in float32
        naive = values.clone().requires_grad_()
        plain(naive, p).sum().backward()
        assert not torch.isfinite(naive.grad).all()


def test_a_fixed_exponent_is_state_but_no_parameter():
    learned, fixed = GeM(3.0), GeM(3.0, learned=False)
    assert [name for name, _ in learned.named_parameters()] == ["p"]
    assert list(fixed.parameters()) == []
    fixed.load_state_dict({"p": torch.tensor([4.0])})
    assert fixed.p.item() == 4.0
    assert "p=4, learned=False" in repr(fixed)


def test_first_is_the_first_token():
    tokens = torch.arange(24.0).view(2, 4, 3)
    assert torch.equal(First()(tokens.transpose(1, 2)), tokens[:, 0])
    assert torch.equal(First()(tokens), tokens[..., 0])
