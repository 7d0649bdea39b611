"""`langevin check` passes what is right and names what is wrong."""

from pathlib import Path

import pytest
import torch

import langevin
import planted
from langevin.mixers import examples

PLANTED = str(Path(planted.__file__))


@pytest.mark.parametrize("spec", [*examples(), "neighbor+drift", "heat(t=0.2)+noise(std=0.1)"])
def test_every_mixer_and_wrapper_passes(spec):
    report = langevin.check(spec)
    assert report.passed, str(report)
    assert sum(row.passed is True for row in report.rows) >= 9


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
    report = langevin.check(f"{PLANTED}:{mistake}", against=against)
    assert not report.passed
    assert broken <= set(report.failures), str(report)


def test_a_leak_is_reported_with_its_position():
    report = langevin.check(f"{PLANTED}:CircularNeighbours", only=["no future leak"])
    (row,) = report.rows
    assert "changing token 16 of 17" in row.detail
    assert "position 0" in row.detail


def test_what_a_subject_does_not_take_is_said_and_not_failed():
    report = langevin.check(planted.SymmetricSmoothing)
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
