"""`langevin.attend`: shapes, types and refusals."""

import pytest
import torch

import langevin

SPECS = [
    "softmax",
    "ssmax",
    "heat(t=0.28)",
    "heat(t='adaptive')",
    "heat(t=1, alpha=0.1)",
    "sigmoid",
    "sima",
]


def tensors(*lengths, heads=(4, 4, 4), dtype=torch.float64):
    lengths = lengths or (9, 9, 9)
    return [torch.randn(2, h, n, 8, dtype=dtype) for h, n in zip(heads, lengths, strict=True)]


@pytest.mark.parametrize("spec", SPECS)
def test_the_last_queries_of_a_sequence_get_the_last_outputs(spec):
    q, k, v = tensors()
    full = langevin.attend(q, k, v, spec, causal=True)
    for last in (1, 3):
        options = {"past_queries": q[:, :, :-last]} if spec == "sima" else {}
        part = langevin.attend(q[:, :, -last:], k, v, spec, causal=True, **options)
        torch.testing.assert_close(part, full[:, :, -last:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_shared_key_heads_are_repeated_key_heads(spec):
    q, k, v = tensors(heads=(4, 2, 2))
    grouped = langevin.attend(q, k, v, spec, causal=True)
    repeated = langevin.attend(q, *(x.repeat_interleave(2, 1) for x in (k, v)), spec, causal=True)
    torch.testing.assert_close(grouped, repeated, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS)
def test_every_type_in_is_the_type_out(spec, dtype):
    q, k, v = tensors(dtype=dtype)
    out, weights = langevin.attend(q, k, v, spec, causal=True, return_weights=True)
    assert out.dtype == weights.dtype == langevin.attend(q, k, v, spec, causal=True).dtype == dtype
    assert weights.shape == (2, 4, 9, 9)
    assert out.isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_attend_compiles_into_one_graph(spec):
    torch._dynamo.reset()
    q, k, v = tensors(dtype=torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def mix(q, k, v):
        return langevin.attend(q, k, v, spec, causal=True)

    torch.testing.assert_close(mix(q, k, v), langevin.attend(q, k, v, spec, causal=True))


@pytest.mark.parametrize("spec", SPECS)
def test_queries_that_see_nothing_give_zero_and_finite_gradients(spec):
    q, k, v = (x.requires_grad_() for x in tensors())
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    out = langevin.attend(q, k, v, spec, causal=True, key_padding_mask=mask)
    assert not out[0, :, :4].any()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()


def test_causal_sima_without_its_past_queries_is_refused():
    q, k, v = tensors(1, 9, 9)
    with pytest.raises(ValueError, match="normalises by past queries"):
        langevin.attend(q, k, v, "sima", causal=True)


def test_neighbor_has_no_queries():
    with pytest.raises(ValueError, match="without q, k and v"):
        langevin.attend(*tensors(), "neighbor")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v: ((q[0], k, v), {}), "four dimensions"),
        (lambda q, k, v: ((q[:1], k, v), {}), "differ in batch"),
        (lambda q, k, v: ((q[..., :4], k, v), {}), "differ in head width"),
        (lambda q, k, v: ((q, k, v[:, :, :-1]), {}), "k and v differ"),
        (lambda q, k, v: ((q, k[:, :3], v[:, :3]), {}), "do not divide"),
        (lambda q, k, v: ((q.float(), k, v), {}), "one floating type"),
        (lambda q, k, v: ((q, k[:, :, :5], v[:, :, :5]), {"causal": True}), "cannot be the last"),
        (lambda q, k, v: ((q, k, v), {"window": 0}), "is not a number of keys"),
        (lambda q, k, v: ((q, k, v), {"key_padding_mask": torch.ones(2, 9)}), "expected bool"),
        (lambda q, k, v: ((q, k, v), {"key_padding_mask": torch.ones(2, 8) > 0}), "expected (2, 9)"),
        (lambda q, k, v: ((q, k, v), {"documents": torch.tensor([[0, 1, 0] * 3] * 2)}), "comes back"),
        (lambda q, k, v: ((q, k, v), {"implementation": "fast"}), "'fused' or 'reference'"),
        (lambda q, k, v: ((q, k, v), {"parameters": {"s": torch.ones(4)}}), "learns no 's'"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_words(change, said):
    arguments, options = change(*tensors())
    with pytest.raises(langevin.errors.UsageError) as error:
        langevin.attend(*arguments, "softmax", **options)
    assert said in str(error.value)


def test_parameters_take_the_place_of_initial_values_and_get_gradients():
    q, k, v = tensors()
    s = torch.full((4,), 0.43, dtype=torch.float64, requires_grad=True)
    out = langevin.attend(q, k, v, "ssmax", causal=True, parameters={"s": s})
    torch.testing.assert_close(out, langevin.attend(q, k, v, "ssmax(s=0.43)", causal=True))
    (grad,) = torch.autograd.grad(out.sum(), s)
    assert grad.abs().min() > 0
