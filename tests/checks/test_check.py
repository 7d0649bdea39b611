"""`langevin check` passes what is right and names what is wrong."""

from pathlib import Path

import planted
import pytest
import torch

import langevin
from langevin.checks.properties import PROPERTIES
from langevin.mixers import examples, names

PLANTED = str(Path(planted.__file__))


QUICK = [name for name in PROPERTIES if name != "compiles"]  # one variant of each mixer is compiled
SPECS = [*examples(), "neighbor+drift", "heat(t=0.2)+noise(std=0.1)"]


@pytest.mark.parametrize("spec", SPECS)
def test_every_mixer_and_wrapper_passes(spec):
    only = list(PROPERTIES) if spec in names() else QUICK
    report = langevin.check(spec, only=only)
    assert report.passed, str(report)
    offered = {row.property for row in report.rows if row.passed}
    missing = set(only) - offered
    assert missing <= {"window", "grouped heads", "low precision", "formula"}
    assert not missing or spec.startswith("neighbor")


def test_a_right_mixer_from_a_file_passes_and_its_formula_is_recognised():
    report = langevin.check(f"{PLANTED}:honest", against="softmax")
    assert report.passed, str(report)
    assert {row.property: row.passed for row in report.rows}["formula"] is True


@pytest.mark.parametrize(
    ("mistake", "broken", "against"),
    [
        ("sima_over_all_tokens", {"no future leak", "prefix = full"}, None),
        ("sima_over_all_tokens", {"formula"}, "sima"),
        ("time_from_unmasked_scores", {"no future leak", "prefix = full"}, None),
        ("ssmax_with_tensor_length", {"prefix = full", "cached = full", "padding"}, None),
        ("ssmax_with_query_length", {"cached = full"}, None),
        ("additive_ssmax", {"formula"}, "ssmax(s=0.43)"),
        ("CircularNeighbours", {"no future leak", "prefix = full"}, None),
        ("BleedingPadding", {"padding"}, None),
        ("NoisyEvaluation", {"evaluation is deterministic"}, None),
        ("SymmetricSmoothing", {"no future leak"}, None),
    ],
)
def test_a_planted_mistake_is_named(mistake, broken, against):
    report = langevin.check(f"{PLANTED}:{mistake}", against=against, only=QUICK)
    assert not report.passed
    assert broken <= set(report.failures), str(report)


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("SamplesReadEachOther", "alone = in a batch"),
        ("WindowIgnored", "window"),
        ("RepeatedHeads", "grouped heads"),
        ("no_gradient_if_masked", "gradients"),
        ("diagonal_backward", "gradients"),
        ("padding_ignored_if_packed", "padded and packed"),
        ("LeakingConvolution", "no future leak"),
    ],
)
def test_a_subtle_mistake_fails_the_property_that_it_breaks_and_no_other(mistake, named):
    report = langevin.check(f"{PLANTED}:{mistake}", only=QUICK)
    consequences = {"cached = full"} if mistake == "WindowIgnored" else set()
    assert {named} <= set(report.failures) <= {named} | consequences, str(report)


def test_a_wrong_gradient_is_named_with_its_length_and_condition():
    (row,) = langevin.check(f"{PLANTED}:diagonal_backward", only=["gradients"]).rows
    assert row.detail.startswith("150 tokens: the gradient of")
    (row,) = langevin.check(f"{PLANTED}:no_gradient_if_masked", only=["gradients"]).rows
    assert row.detail.startswith("left-padded, 17 tokens: the gradient of")


@pytest.mark.parametrize(
    "right",
    [
        "Convolution",
        "NormalisedConvolution",
        "InFloat32",
        "OnlyInFloat32",
        "always_causal",
        "options_forwarded",
    ],
)
def test_what_is_right_in_an_unusual_way_passes(right):
    report = langevin.check(f"{PLANTED}:{right}", only=QUICK)
    assert report.passed, str(report)
    assert {row.property: row.passed for row in report.rows}["no future leak"] is True


@pytest.mark.parametrize("function", ["without_causal", "causal_not_forwarded"])
def test_a_bidirectional_function_is_not_said_to_leak(function):
    report = langevin.check(f"{PLANTED}:{function}", only=QUICK)
    rows = {row.property: row for row in report.rows}
    assert report.passed, str(report)
    for name in ("no future leak", "prefix = full", "cached = full"):
        assert (rows[name].passed, rows[name].detail) == (None, "not causal")
    assert rows["gradients"].passed


@pytest.mark.parametrize(
    ("subject", "said"),
    [("InFloat32", "(float32 inside)"), ("OnlyInFloat32", "(in float32, as float64 does")],
)
def test_a_row_tells_when_a_subject_computes_in_float32(subject, said):
    (row,) = langevin.check(f"{PLANTED}:{subject}", only=["gradients"]).rows
    assert said in row.detail


def test_whatever_a_module_raises_becomes_a_row():
    report = langevin.check(planted.Failing)
    assert {row.passed for row in report.rows} == {False, None}
    assert all("no table for these tokens" in row.detail for row in report.rows if row.passed is False)


def test_a_leak_is_reported_with_its_position():
    report = langevin.check(f"{PLANTED}:CircularNeighbours", only=["no future leak"])
    (row,) = report.rows
    assert "changing token 16 of 17" in row.detail
    assert "position 0" in row.detail


def test_what_a_subject_does_not_take_is_said_and_not_failed():
    report = langevin.check(planted.SymmetricSmoothing, only=["packed documents"])
    rows = {row.property: row for row in report.rows}
    assert rows["packed documents"].passed is None
    assert rows["packed documents"].detail == "takes no documents"


def test_noise_asked_for_at_evaluation_is_seen():
    report = langevin.check("softmax+noise(eval=True)", only=["evaluation is deterministic"])
    assert report.failures == ["evaluation is deterministic"]


def test_checking_leaves_the_random_stream_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    langevin.check("softmax", only=["gradients"])
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.py:Mixer", "no such file"),
        (f"{PLANTED}:Honest", "unknown name in"),
        (f"{PLANTED}:math", "unknown name in"),
        ("hear", "unknown mixer 'hear'"),
    ],
)
def test_a_wrong_target_is_refused_in_words(target, said):
    with pytest.raises(ValueError, match=said):
        langevin.check(target)


def test_an_unknown_property_is_refused():
    with pytest.raises(ValueError, match="unknown property"):
        langevin.check("softmax", only=["speed"])


def test_a_file_that_does_not_import_is_refused(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    with pytest.raises(ValueError, match="does not import"):
        langevin.check(f"{broken}:Mixer")
