"""Compiled once for all lengths and batch sizes, exported with dynamic shapes, and under torch.func."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export

import langevin

RECURRENT = "neighbor(kind='recurrent')"
MEAN = "neighbor(kind='content', hops='dilated', mean=True)"
SPECS = [
    "softmax",
    "ssmax",
    "heat(t=0.28)",
    "heat(t='adaptive')",
    "heat(t='head', distance='squared')",
    "heat(t=1, alpha=0.1)",
    "sigmoid",
    "sima",
    "softmax+drift",
]
SHAPES = [(2, 7), (3, 130), (5, 257)]
KERNELS = ["softmax", "heat(t=1, alpha=0.1)", "sigmoid", "sima"]
CASES = [
    *((spec, "plain") for spec in SPECS),
    *((spec, "masked") for spec in KERNELS),
    ("sima", "bidirectional"),
    ("softmax", "window"),
    ("softmax", "alibi"),
    ("sigmoid", "alibi"),
]


def tensors(batch, length, queries=None, heads=(4, 2, 2)):
    lengths = (queries or length, length, length)
    return [torch.randn(batch, h, n, 8) for h, n in zip(heads, lengths, strict=True)]


class Mixing(torch.nn.Module):
    def __init__(self, spec, view="plain"):
        super().__init__()
        self.spec, self.view = spec, view

    def forward(self, q, k, v):
        options = {"causal": self.view != "bidirectional"}
        if self.view == "window":
            options["window"] = 5
        if self.view == "alibi":
            options["alibi"] = True
        if self.view == "masked":
            index = torch.arange(k.shape[2]).expand(k.shape[0], -1)
            options |= {"key_padding_mask": index > 1, "documents": index // 6}
        return langevin.attend(q, k, v, self.spec, **options)


@pytest.mark.parametrize(("spec", "view"), CASES)
def test_a_few_graphs_serve_all_lengths_and_batch_sizes(spec, view):
    """One for the first shape, one for any; a third where a short text is a single chunk or block."""
    torch._dynamo.reset()
    counter, mix = CompileCounter(), Mixing(spec, view)
    compiled = torch.compile(mix, fullgraph=True, backend=counter)
    for shape in SHAPES:
        inputs = [x.requires_grad_() for x in tensors(*shape)]
        ours, plain = compiled(*inputs), mix(*inputs)
        torch.testing.assert_close(ours, plain)
        for a, b in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (ours, plain)), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= (4 if view == "window" else 3)


@pytest.mark.parametrize("spec", ["softmax", "sigmoid", "neighbor", MEAN, RECURRENT])
def test_two_graphs_of_a_module_serve_all_lengths(spec):
    torch._dynamo.reset()
    options = {} if spec.startswith("neighbor") else {"positions": "rope"}
    counter, module = CompileCounter(), langevin.mixers.build(spec, width=16, heads=2, **options)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for shape in ((2, 7), (3, 20), (4, 140)):
        x = torch.randn(*shape, 16)
        torch.testing.assert_close(compiled(x), module(x))
    assert counter.frame_count == 2


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "sima"])
def test_two_graphs_decode_texts_of_any_length(spec):
    torch._dynamo.reset()
    counter, mix = CompileCounter(), Mixing(spec)
    compiled = torch.compile(mix, fullgraph=True, backend=counter)
    for length in (5, 6, 7, 140):
        inputs = tensors(2, length, queries=1)
        torch.testing.assert_close(compiled(*inputs), mix(*inputs))
    assert counter.frame_count == 2


@pytest.mark.parametrize(("spec", "view"), [*CASES, ("sima", "window")])
def test_an_exported_graph_has_free_lengths_and_no_operator_of_ours(spec, view):
    mix = Mixing(spec, view)
    free = {0: Dim("batch", min=2, max=64), 2: Dim("length", min=3, max=4096)}
    exported = export(mix, tuple(tensors(3, 150)), dynamic_shapes=(free, free, free))
    assert "langevin" not in str(exported.graph)
    for shape in ((2, 4), (5, 133), (3, 256)):
        inputs = tensors(*shape)
        torch.testing.assert_close(exported.module()(*inputs), mix(*inputs))


@pytest.mark.parametrize("causal", [False, True])
def test_an_exported_recurrence_has_free_lengths(causal):
    module = langevin.mixers.build(RECURRENT, width=6, heads=2, causal=causal)
    free = {0: Dim.AUTO, 1: Dim.AUTO}
    exported = export(module, (torch.randn(3, 18, 6),), dynamic_shapes=(free,))
    for shape in ((2, 2), (5, 16), (3, 300), (2, 5000)):
        x = torch.randn(*shape, 6)
        torch.testing.assert_close(exported.module()(x), module(x))


def test_a_recurrence_is_mapped_over_examples_by_torch_func():
    module = langevin.mixers.build(RECURRENT, width=6, heads=2, causal=True)
    weights, x = dict(module.named_parameters()), torch.randn(3, 20, 6)

    def loss(weights, x):
        return torch.func.functional_call(module, weights, x[None]).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    whole = torch.func.grad(lambda weights: sum(loss(weights, one) for one in x))(weights)
    for name, gradient in whole.items():
        torch.testing.assert_close(mapped[name].sum(0), gradient)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_of_single_examples_by_torch_func(spec):
    def loss(q, k, v):
        return langevin.attend(*(x[None] for x in (q, k, v)), spec, causal=True).square().sum()

    inputs = tensors(3, 9)
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*inputs)
    for i in range(3):
        alone = [x[i].clone().requires_grad_() for x in inputs]
        expected = torch.autograd.grad(loss(*alone), alone)
        for a, e in zip(mapped, expected, strict=True):
            torch.testing.assert_close(a[i], e)


@pytest.mark.parametrize("spec", ["sigmoid", "heat(t=1, alpha=0.1)"])
def test_what_is_given_to_a_whole_batch_is_mapped_too(spec):
    q, k, v = tensors(2, 9)
    qs = torch.randn(3, *q.shape)
    mapped = torch.func.vmap(lambda q: langevin.attend(q, k, v, spec, causal=True))(qs)
    for i in range(3):
        torch.testing.assert_close(mapped[i], langevin.attend(qs[i], k, v, spec, causal=True))
