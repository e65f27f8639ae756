"""Batch norm with frozen statistics: the gradients of torch's layer, in the memory format of the input."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rankgrad.models import Embedder, ModelSpec, build_model, frozen_norm
from rankgrad.models.frozen_norm import FrozenBatchNorm2d, FrozenNorm, use_frozen_norm
from rankgrad.models.trunks import build_trunk

TIMM = "efficientnet_lite0"
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.fixture
def everywhere(monkeypatch):
    """Networks on the CPU take the pass that is faster on GPUs only."""
    monkeypatch.setattr(frozen_norm, "_torch_loses_format", lambda x: True)


def example(shape, dtype=torch.float64, *, affine=True, param_dtype=None, device="cpu", memory_format=torch.contiguous_format):
    """Arguments of FrozenNorm, those with a gradient as leaves."""
    generator, channels = torch.Generator().manual_seed(0), shape[1]

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    x = draw(*shape).to(device, dtype).contiguous(memory_format=memory_format)
    mean, var, weight, bias = draw(channels), draw(channels).square() + 0.1, draw(channels), draw(channels)
    mean, var, weight, bias = (values.to(device, param_dtype or dtype) for values in (mean, var, weight, bias))
    affines = (weight.requires_grad_(), bias.requires_grad_()) if affine else (None, None)
    return x.requires_grad_(), mean, var, *affines, 1e-3


def torch_norm(x, mean, var, weight, bias, eps):
    return F.batch_norm(x, mean, var, weight, bias, eps=eps)


def gradients(function, arguments, d_y):
    y = function(*arguments)
    return y, torch.autograd.grad(y, [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad], d_y)


def assert_as_accurate(found, reference, exact):
    """`found` is no further from `exact` than torch's, up to the noise of another order of the same sums."""
    for ours, theirs, truth in zip(found, reference, exact, strict=True):
        error, usual = ((values.double() - truth).abs().mean() / truth.abs().mean() for values in (ours, theirs))
        assert error <= 1.05 * usual + 1e-6


def trained(model, images):
    """Embeddings and the gradients of all parameters, by name."""
    model.zero_grad()
    embeddings = model(images)
    (embeddings * torch.linspace(-1, 1, embeddings.numel()).view_as(embeddings)).sum().backward()
    return embeddings.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def with_random_statistics(model):
    generator = torch.Generator().manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for values in (layer.running_mean, layer.bias.data):
                values.copy_(0.1 * torch.randn(values.shape, generator=generator))
            for values in (layer.running_var, layer.weight.data):
                values.copy_(torch.rand(values.shape, generator=generator) + 0.5)
    return model


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 3)])
def test_gradients_are_the_derivatives_and_those_of_torch(shape, affine):
    arguments = example(shape, affine=affine)
    assert torch.autograd.gradcheck(FrozenNorm.apply, arguments)
    d_y = torch.randn(shape, dtype=torch.float64)
    (y, found), (expected_y, expected) = (gradients(f, arguments, d_y) for f in (FrozenNorm.apply, torch_norm))
    assert torch.equal(y, expected_y)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wanted", [(0,), (3,), (4,), (0, 3), (0, 4), (3, 4)])
def test_only_gradients_that_are_asked_for(wanted):
    arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in example((2, 3, 4, 4))]
    for index in wanted:
        arguments[index].requires_grad_()
    d_y = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    (_, found), (_, expected) = (gradients(f, arguments, d_y) for f in (FrozenNorm.apply, torch_norm))
    torch.testing.assert_close(found, expected)
    # the input is kept for the gradients of weight and bias only
    y = FrozenNorm.apply(*arguments)
    kept, *_ = y.grad_fn.saved_tensors
    assert (kept is None) == (wanted == (0,))


@pytest.mark.parametrize("incoming", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
def test_the_gradient_has_the_format_of_the_input(memory_format, incoming):
    arguments = example((2, 3, 4, 5), memory_format=memory_format)
    d_y = torch.randn(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=incoming)
    y, (d_x, *_) = gradients(FrozenNorm.apply, arguments, d_y)
    assert y.stride() == d_x.stride() == arguments[0].stride()


@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("dtype", "param_dtype"), [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_bfloat16_is_as_accurate_as_torch(dtype, param_dtype, memory_format):
    arguments = example((8, 16, 20, 20), dtype, param_dtype=param_dtype, memory_format=memory_format)
    d_y = torch.randn(8, 16, 20, 20).to(dtype).contiguous(memory_format=memory_format)
    wide = [a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments]
    (y, found), (expected_y, reference) = (gradients(f, arguments, d_y) for f in (FrozenNorm.apply, torch_norm))
    assert torch.equal(y, expected_y)
    assert [values.dtype for values in found] == [dtype, param_dtype, param_dtype]
    assert_as_accurate(found, reference, gradients(torch_norm, wide, d_y.double())[1])


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("mode", ["frozen", "fixed"])
@pytest.mark.parametrize("trunk", ["resnet18", TIMM])
def test_networks_agree_with_untouched_ones(trunk, mode, monkeypatch):
    calls = []
    model = with_random_statistics(build_model(ModelSpec(trunk=trunk, dim=8, batch_norm=mode), seed=0))
    # untouched layers, with the modes of the spec
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        if type(layer).__name__.startswith("Frozen"):
            layer.__class__ = type(layer).__mro__[1]
    images = torch.randint(256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected, expected_gradients = trained(plain, images)
    monkeypatch.setattr(FrozenNorm, "apply", lambda *arguments, apply=FrozenNorm.apply: calls.append(1) or apply(*arguments))
    found, found_gradients = trained(model, images)
    assert len(calls) == sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) > 0
    assert torch.equal(found, expected)
    torch.testing.assert_close(found_gradients, expected_gradients, rtol=1e-3, atol=1e-5)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert all((parameter.grad is None) == (mode == "fixed") for layer in norms for parameter in layer.parameters())


@pytest.mark.usefixtures("everywhere")
def test_autocast_gives_the_gradients_of_torch_in_channels_last():
    network = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)).eval().to(memory_format=torch.channels_last)
    )
    x, incoming = torch.randn(2, 3, 12, 12).contiguous(memory_format=torch.channels_last), []
    network[1].register_forward_pre_hook(lambda layer, args: args[0].register_hook(incoming.append) and None)
    found = []
    for _ in range(2):
        network.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = network(x)
        y.float().square().sum().backward()
        found.append([parameter.grad.clone() for parameter in network.parameters()])
        use_frozen_norm(network[1])
    assert all(d_x.dtype == torch.bfloat16 and d_x.is_contiguous(memory_format=torch.channels_last) for d_x in incoming)
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("trunk", ["resnet18", TIMM])
def test_classes_and_state_stay_those_of_the_trunk(trunk):
    untouched, spec = build_trunk(trunk).body, ModelSpec(trunk=trunk, dim=8)
    model = build_model(spec, seed=0)
    assert list(model.trunk.state_dict()) == list(untouched.state_dict())
    for layer, before in zip(model.trunk.modules(), untouched.modules(), strict=True):
        assert isinstance(layer, type(before))
    live = build_model(ModelSpec(trunk=trunk, dim=8, batch_norm="live"), seed=0)
    assert [type(layer) for layer in live.trunk.modules()] == [type(layer) for layer in untouched.modules()]


@pytest.mark.parametrize("trunk", ["resnet18", TIMM])
def test_models_are_copied_and_pickled(trunk):
    model = build_model(ModelSpec(trunk=trunk, dim=8), seed=0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert isinstance(other, Embedder)
        assert torch.equal(other(images), model(images))


def test_other_layers_are_left_alone():
    class Own(nn.BatchNorm2d):
        pass

    for layer in (Own(3), nn.BatchNorm1d(3), nn.GroupNorm(1, 3)):
        before = type(layer)
        use_frozen_norm(layer)
        assert type(layer) is before


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        raise AssertionError("the pass of torch was expected")


@pytest.fixture
def refusing(everywhere, monkeypatch):
    monkeypatch.setattr(frozen_norm, "FrozenNorm", Refuses)


def small_network():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    use_frozen_norm(network[1])
    assert type(network[1]) is FrozenBatchNorm2d
    return network


@pytest.mark.usefixtures("refusing")
def test_the_pass_of_torch_without_gradients_and_in_training_mode():
    network, x = small_network(), torch.randn(2, 3, 4, 4)
    with pytest.raises(AssertionError, match="the pass of torch"):
        network(x)
    with torch.no_grad():
        network(x)
    with torch.inference_mode():
        network(x)
    network[1](x.new_zeros(2, 4, 3, 3))  # no gradient for the input: nothing to gain
    network.train()(x)
    assert network[1].num_batches_tracked == 1


@pytest.mark.usefixtures("refusing")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_graphs_hold_the_layer_of_torch():
    network, x = small_network(), torch.randn(2, 3, 4, 4)
    expected = network.requires_grad_(False)(x)
    network.requires_grad_()
    for strict in (False, True):
        program = torch.export.export(network, (x,), strict=strict)
        assert any("batch_norm" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(x), expected)
    torch.testing.assert_close(torch.jit.trace(network, (x,))(x), expected)
    torch.testing.assert_close(torch.compile(network, backend="aot_eager", fullgraph=True)(x), expected)


@pytest.mark.usefixtures("refusing")
def test_transforms_take_the_layer_of_torch():
    network, x = small_network(), torch.randn(2, 3, 4, 4)

    def loss(state, one):
        return torch.func.functional_call(network, state, one[None]).square().sum()

    state = dict(network.named_parameters())
    per_image = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(state, x)
    assert per_image["1.weight"].shape == (2, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_channels_last_on_a_gpu():
    shape, channels_last = (16, 24, 14, 14), {"memory_format": torch.channels_last}
    arguments = example(shape, torch.bfloat16, param_dtype=torch.float32, device="cuda", **channels_last)
    d_y = torch.randn(shape, device="cuda").bfloat16().contiguous(**channels_last)
    wide = [a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments]
    (y, found), (expected_y, reference) = (gradients(f, arguments, d_y) for f in (FrozenNorm.apply, torch_norm))
    assert torch.equal(y, expected_y)
    assert found[0].is_contiguous(**channels_last)
    assert_as_accurate(found, reference, gradients(torch_norm, wide, d_y.double())[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("trunk", ["resnet18", TIMM])
def test_a_network_on_a_gpu_copies_no_gradient_between_formats(trunk):
    model = build_model(ModelSpec(trunk=trunk, dim=8), seed=0).to("cuda", memory_format=torch.channels_last)
    images = torch.randint(256, (4, 3, 64, 64), dtype=torch.uint8, device="cuda").contiguous(memory_format=torch.channels_last)
    formats = []

    def watch(layer, args):
        args[0].register_hook(lambda d_x: formats.append(d_x.is_contiguous(memory_format=torch.channels_last)))

    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in norms:
        layer.register_forward_pre_hook(watch)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        embeddings = model(images)
    embeddings[:, 0].sum().backward()
    assert formats == [True] * len(norms)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
