"""Who sees whom: counted keys, caches with unused room, documents by position, masks of any shape."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import formulas
import langevin
from langevin.errors import UsageError
from langevin.mixers import Geometry, Inputs, View, parse

SPECS = [
    "softmax",
    "ssmax",
    "heat(t=0.28)",
    "heat(t='adaptive')",
    "heat(t='head', distance='squared')",
    "heat(t=1, alpha=0.1)",
    "sigmoid",
    "sigmoid(bias='head')",
    "sima(scale='n')",
]
WITHOUT_SIMA = [spec for spec in SPECS if "sima" not in spec]
H, D = 4, 8


def tensors(queries, keys, kv_heads=2, batch=2):
    """float64 q, k, v."""
    return [
        torch.randn(batch, h, n, D, dtype=torch.float64)
        for h, n in ((H, queries), (kv_heads, keys), (kv_heads, keys))
    ]


class Mixing:
    """A mechanism with learned scalars off their starts."""

    def __init__(self, spec, alibi=False, kv_heads=2):
        self.mechanism, self.geometry = parse(spec).mixer, Geometry(H, D, kv_heads, alibi=alibi)
        starts = self.mechanism.parameters(self.geometry)
        self.p = {name: x + 0.3 * torch.cos(x + 1) for name, x in starts.items()}

    def inputs(self, q, k, v, view):
        return Inputs(q, k, v, view, self.p, self.geometry)

    def __call__(self, *inputs):
        return self.mechanism.attend(self.inputs(*inputs))

    def weights(self, *inputs):
        return self.mechanism.weights(self.inputs(*inputs))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_the_number_of_visible_keys_comes_from_the_view():
    real = torch.tensor([[False, True, True, True], [True, True, True, False]])
    view = View.of(4, 4, causal=True, key_padding_mask=real)
    assert view.visible_BQ.tolist() == [[0, 1, 2, 3], [1, 2, 3, 3]]
    view = View.of(4, 4, causal=True, documents=torch.tensor([[7, 7, 3, 3]]))
    assert view.visible_BQ.tolist() == [[1, 2, 1, 2]]
    assert View.of(4, 4, causal=True, window=2).visible_BQ.tolist() == [[1, 2, 2, 2]]
    assert View.of(4, 4, causal=False, window=2).visible_BQ.tolist() == [[2, 3, 3, 2]]
    assert View.of(1, 9, causal=True).visible_BQ.tolist() == [[9]]
    assert View.of(3, 3, causal=False, key_padding_mask=real[:, :3]).visible_BQ.tolist() == [
        [2, 2, 2],
        [3, 3, 3],
    ]


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("spec", WITHOUT_SIMA)
def test_a_cache_with_unused_room_gives_what_its_tokens_give(spec, queries, alibi):
    """One graph for all positions; what stands behind the last query is never read."""
    torch._dynamo.reset()
    mix, (_, k, v) = Mixing(spec, alibi), tensors(1, 13)
    real = torch.ones(2, 13, dtype=torch.bool)
    real[0, :2] = False

    def decode(q, k, v, past):
        view = View.of(queries, 13, causal=True, past=past, key_padding_mask=real)
        return mix(q, k, v, view)

    compiled = torch.compile(decode, fullgraph=True, backend="eager")
    for past in (2, 5, 10):
        q, used = tensors(queries, 1)[0], past + queries
        view = View.of(queries, used, causal=True, key_padding_mask=real[:, :used])
        expected = mix(q, k[:, :, :used], v[:, :, :used], view)
        stale = [torch.cat([x[:, :, :used], 1e3 + x[:, :, used:]], 2) for x in (k, v)]
        with torch.compiler.set_stance("fail_on_recompile" if past > 2 else "default"):
            close(compiled(q, *stale, torch.tensor(past)), expected)
        close(decode(q, *stale, past), expected)


def test_a_position_is_read_when_the_view_is_made():
    """A cache counts on in place while its view is in use."""
    counter = torch.tensor(4)
    view = View.of(1, 9, causal=True, past=counter, key_padding_mask=torch.ones(1, 5, dtype=torch.bool))
    counter.add_(1)
    assert view.visible_BQ.tolist() == [[5]]
    assert view.mask_BQK.tolist() == [[[True] * 5 + [False] * 4]]


def test_sima_goes_on_from_its_state_at_a_position_known_only_to_the_graph():
    q, k, v = tensors(7, 7, kv_heads=4)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0] * 9])
    full = langevin.attend(q, k, v, "sima(scale='n')", causal=True, documents=ids[:, :7])
    mix, state, outs = Mixing("sima(scale='n')", kv_heads=4), None, []
    for i in range(7):
        view = View.of(1, 9, causal=True, past=torch.tensor(i), documents=ids)
        x = mix.inputs(*(y[:, :, i : i + 1] for y in (q, k, v)), view)
        out, state = mix.mechanism.advance(x, state)
        outs.append(out)
    close(torch.cat(outs, 2), full)


def test_a_state_refuses_what_it_cannot_follow():
    q, k, v = tensors(3, 3, kv_heads=4)
    mix = Mixing("sima", kv_heads=4)
    for view in (
        View.of(3, 3, causal=True, window=2),
        View.from_mask(shapes_of_masks()["holes"], causal=True),
    ):
        with pytest.raises(UsageError, match="know no window"):
            mix.mechanism.advance(mix.inputs(q, k, v, view), None)


def test_documents_are_read_from_positions_that_start_anew():
    ids = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 0, 1, 2]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 2, 2]])
    for causal in (True, False):
        view = View.of(6, 6, causal=causal, position_ids=ids)
        assert torch.equal(view.mask_BQK, View.of(6, 6, causal=causal, documents=documents).mask_BQK)
    for past in (4, torch.tensor(4)):  # the third document goes on after four cached tokens
        view = View.of(2, 6, causal=True, position_ids=ids[:, 4:], past=past)
        assert torch.equal(view.mask_BQK, View.of(6, 6, causal=True, documents=documents).mask_BQK[:, 4:])
    assert View.of(6, 9, causal=True, position_ids=torch.arange(3, 9)[None]).plain
    assert View.of(6, 6, causal=True, position_ids=torch.arange(7, 13)[None]).plain


def shapes_of_masks():
    prefix = torch.ones(9, 9, dtype=torch.bool).tril()
    prefix[:, :4] = True
    holes = torch.rand(2, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    holes[1, 3] = False
    return {"prefix": prefix.expand(2, 9, 9), "holes": holes}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("shape", ["prefix", "holes"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_mask_of_any_shape_is_computed_exactly(spec, shape, mode):
    torch._dynamo.reset()
    mix, qkv = Mixing(spec), [x.requires_grad_() for x in tensors(9, 9)]
    mask = shapes_of_masks()[shape]
    view = View.from_mask(mask, causal=True)
    expected, weights = formulas.attention(mix.mechanism, mix.p, *qkv, causal=False, mask=mask)
    close(mix.weights(*qkv, view), weights)
    assert torch.equal(view.visible_BQ, mask.sum(-1))

    def run(q, k, v, mask):
        return mix(q, k, v, View.from_mask(mask, causal=True))

    run = run if mode == "eager" else torch.compile(run, fullgraph=True, backend="eager")
    actual = run(*qkv, mask)
    close(actual, expected)
    cotangent = torch.randn_like(actual)
    gradients = (torch.autograd.grad(y, qkv, cotangent) for y in (actual, expected))
    for a, e in zip(*gradients, strict=True):
        close(a, e)


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("spec", ["softmax", "sigmoid", "heat(t=1, alpha=0.1)"])
def test_a_mask_of_any_shape_keeps_distances(spec, alibi):
    mix, (q, k, v) = Mixing(spec, alibi), tensors(4, 9)
    view = View.from_mask(shapes_of_masks()["prefix"][:, 5:], causal=True)
    weights, causal = mix.weights(q, k, v, view), mix.weights(q, k, v, View.of(4, 9, causal=True))
    close(mix(q, k, v, view), weights @ v.repeat_interleave(2, 1))
    assert torch.equal(weights, causal)  # the prefix lies before these queries


def test_a_padded_mask_is_recognised_as_padding_and_made_without_large_copies():
    real = torch.ones(2, 300, dtype=torch.bool)
    real[0, :7] = False
    mask = View.of(300, 300, causal=True, key_padding_mask=real).mask_BQK
    with Transients() as made:
        view = View.from_mask(mask, causal=True)
    assert view.dense_BQK is None
    assert torch.equal(view.mask_BQK, mask)
    assert made.bytes <= 5 * mask.numel()


class Transients(TorchDispatchMode):
    """The bytes of all tensors that operations make."""

    bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not op.is_view:
            self.bytes += out.nbytes
        return out


@pytest.mark.parametrize("spec", WITHOUT_SIMA)
def test_more_queries_than_keys_are_right_or_refused(spec):
    q, k, v = tensors(9, 5)
    for options in ({"causal": True}, {"window": 3}, {"alibi": True}):
        with pytest.raises(UsageError, match="9 queries"):
            langevin.attend(q, k, v, spec, **options)
    if "alpha" in spec:
        with pytest.raises(UsageError, match="no distance"):
            langevin.attend(q, k, v, spec)
    else:
        out = langevin.attend(q, k, v, spec)
        close(out, torch.cat([langevin.attend(q[:, :, i : i + 1], k, v, spec) for i in range(9)], 2))


@pytest.mark.parametrize("spec", SPECS)
def test_one_mask_serves_a_batch_of_documents(spec):
    q, k, v = tensors(6, 6)
    real = torch.tensor([[True] * 5 + [False]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 2, 2]])
    for first, second in ((real, documents), (real.expand(2, -1), documents[:1])):
        for causal in (True, False):
            options = {"causal": causal}
            out = langevin.attend(q, k, v, spec, key_padding_mask=first, documents=second, **options)
            options |= {"key_padding_mask": first.expand(2, -1), "documents": second.expand(2, -1)}
            close(out[:, :, :5], langevin.attend(q, k, v, spec, **options)[:, :, :5])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
def test_nothing_gives_nothing(spec, batch, length, causal):
    for options in ({}, {"key_padding_mask": True}, {"documents": True}, {"window": 2}, {"alibi": True}):
        q, k, v = (x.requires_grad_() for x in tensors(length, length, batch=batch))
        if "sima" in spec and "alibi" in options:
            continue
        if "key_padding_mask" in options:
            options = {"key_padding_mask": torch.ones(batch, length, dtype=torch.bool)}
        if "documents" in options:
            options = {"documents": torch.zeros(batch, length, dtype=torch.long)}
        out = langevin.attend(q, k, v, spec, causal=causal, **options)
        assert out.shape == q.shape
        out.sum().backward()
        assert v.grad.shape == v.shape


def test_a_window_as_long_as_the_text_is_no_restriction():
    assert View.of(5, 5, causal=True, window=5).plain
    assert not View.of(5, 5, causal=True, window=4).plain
