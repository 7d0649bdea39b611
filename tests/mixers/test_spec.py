"""Spec strings: what they mean, and what is said when they are wrong."""

import pytest

import langevin
from langevin.mixers import build, parse


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("softmax", "softmax"),
        (" heat( t = 0.28 ) ", "heat(t=0.28)"),
        ("heat(t=law)", "heat(t='law')"),
        ("sigmoid(bias='-log n')", "sigmoid"),
        ("heat(t=0.2)+noise(std=0.1)", "heat(t=0.2)+noise"),
        ("softmax+drift(kind='gate')+noise", "softmax+drift(kind='gate')+noise"),
        ("neighbor(iters=4, alpha=0.5)", "neighbor"),
        ("standard", "softmax"),
        ("logistic", "sigmoid"),
        ("softmax_free", "sima"),
        ("diffusion_fixed", "heat(t=1.0)"),
        ("diffusion_fixed(t=0.28)", "heat(t=0.28)"),
        ("diffusion_adaptive", "heat(t='adaptive')"),
    ],
)
def test_a_spec_reads_and_writes(text, canonical):
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hear", "Did you mean 'heat'"),
        ("heat(tt=1)", "Did you mean 't'"),
        ("heat(distanc='dot')", "Did you mean 'distance'"),
        ("heat(t=-1)", "must be positive"),
        ("heat(t=0)", "must be positive"),
        ("heat(t='slow')", "must be a number or 'law' or 'head' or 'adaptive', not 'slow'"),
        ("heat(t=1e999)", "must be finite"),
        ("heat(alpha=-1.0)", "must be 0 or more"),
        ("heat(t_min=2, t_max=1)", "0 < t_min < t_max"),
        ("heat(0.28)", "is not a mixer spec"),
        ("heat(t=0.28", "is not a mixer spec"),
        ("", "is not a mixer spec"),
        ("softmax*drift", "is not a mixer spec"),
        ("softmax+drit", "Did you mean 'drift'"),
        ("softmax(s=1)", "softmax takes no keys"),
        ("drift", "drift is a wrapper"),
        ("softmax+heat", "heat is a mixer"),
        ("noise(std=-1)", "noise is a wrapper"),
        ("softmax+noise(std=-1)", "must be 0 or more"),
        ("softmax+drift(gain=1, kind='gate')", "has no gain"),
        ("softmax+drift(gate=1)", "has no gate"),
        ("neighbor(iters=0)", "must be 1 or more"),
        ("neighbor(alpha=2)", "between 0 and 1"),
        ("neighbor(kind='content', alpha=0.7)", "learns what a token keeps"),
        ("neighbor(kind='recurrent', iters=8)", "hears all tokens"),
        ("neighbor(mean=True)", "has no weight for a mean"),
        ("neighbor(shared=1)", "True or False"),
        ("ssmax(train_length=1)", "must be 2 or more"),
    ],
)
def test_a_wrong_spec_says_what_is_meant(text, said):
    with pytest.raises(langevin.errors.UsageError) as error:
        parse(text)
    assert said in str(error.value)


def test_heads_must_divide_the_width():
    for spec in ("softmax", "neighbor"):
        with pytest.raises(ValueError, match="3 heads do not divide a width of 32"):
            build(spec, width=32, heads=3)


def test_an_unknown_option_is_named():
    with pytest.raises(ValueError, match="windw"):
        build("softmax", width=32, heads=4, windw=3)


def test_the_registered_names_are_listed():
    assert langevin.mixers() == [
        "softmax", "ssmax", "heat", "sigmoid", "sima", "neighbor", "tempered",
    ]  # fmt: skip


def test_a_taken_name_cannot_be_registered_again():
    from langevin.mixers import SoftmaxMechanism, register

    with pytest.raises(ValueError, match="is taken by"):

        @register("softmax")
        class Other(SoftmaxMechanism):
            pass
