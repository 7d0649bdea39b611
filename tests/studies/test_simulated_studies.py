"""Studies in which nothing is to be found, or one thing: how often the page says what is not so.

C2: with nothing to find, version 0.1 called some arm better or worse in 5 to 21 % of its headlines and in a
third to a half of its verdicts. C10: adding seeds one by one had an error of 12.8 %.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from simulated import FACTS, normal_parts, plan_of, told

from langevin.studies import compare
from langevin.studies.compare import concluded
from langevin.studies.display import Display
from langevin.studies.report import render, study_page
from langevin.studies.results import Key

METRICS = ("nll", "ece")
WINNER = re.compile(r"\b(better|worse)\b", re.IGNORECASE)
MARKUP = re.compile(r"<(style|script)\b.*?</\1>|<[^>]+>", re.DOTALL)


def words_of(results):
    """All that the page says, and the verdict as the command prints it."""
    page = MARKUP.sub(" ", render(study_page(results, figures=False)))
    return f"{page} {told(results)} {' '.join(c.state for c in results.contrasts)}"


@pytest.mark.parametrize(("arms", "seeds", "parts"), [(3, 7, 1), (6, 8, 1), (8, 9, 1), (3, 9, 3)])
def test_with_nothing_to_find_a_page_seldom_says_better_or_worse(arms, seeds, parts):
    plan, rng = plan_of(arms, seeds, parts, metrics=METRICS), np.random.default_rng(arms)
    wrong = 0
    for _ in range(1000):
        results = concluded(plan, normal_parts(rng, plan), FACTS, "")
        wrong += bool(WINNER.search(words_of(results)))
    assert wrong <= 55


@pytest.mark.parametrize(("arms", "parts"), [(2, 1), (3, 1), (6, 1), (8, 1), (3, 3)])
@pytest.mark.parametrize("way", [-1, 1])
def test_an_effect_of_two_standard_deviations_is_named_with_the_default_number_of_seeds(arms, parts, way):
    plan, rng = plan_of(arms, parts=parts, metrics=METRICS), np.random.default_rng(arms + parts)
    key, said = Key(plan.parts[0].name, "m1", "nll"), "better" if way < 0 else "worse"
    named = 0
    for _ in range(100):
        results = concluded(plan, normal_parts(rng, plan, effect=2 * way), FACTS, "")
        found = results.contrast(key).state == said
        assert found == (
            re.search(rf"\bm1 is {said} than m0|m1 at part 0 is {said}", words_of(results)) is not None
        )
        named += found
    assert named >= 75


@pytest.mark.parametrize("looks", [(), (7, 9, 12)])
def test_seeds_added_one_by_one_make_no_more_wrong_findings(looks, monkeypatch):
    """Whoever adds a seed as long as nothing is confirmed gains nothing: driven through what compare does,
    which keeps the first look that could confirm something."""
    monkeypatch.setattr(compare, "keep", lambda folder, facts: None)
    most = plan_of(3, 12, metrics=("nll",), looks=looks)
    grown = [replace(most, seeds=most.seeds[:count]) for count in range(5, 13)]
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(500):
        whole, facts, said = normal_parts(rng, most), FACTS, []
        for plan in grown:
            parts = tuple(first(part, len(plan.seeds)) for part in whole)
            monkeypatch.setattr(
                compare, "collect", lambda p, f, now, *rest, x=parts: concluded(p, x, now, "")
            )
            study = compare._Study(plan, None, facts, Display(quiet=True))
            results = study.conclude()
            facts = study.facts
            said.append(any(c.state in ("better", "worse") for c in results.contrasts))
        wrong += any(said)
        if not looks:
            assert len(facts["looks"][0]["seeds"]) == 7  # the first at which two contrasts can be confirmed
            assert len(set(said[2:])) == 1
    assert wrong <= 0.055 * 500


def first(part, count):
    return replace(part, arms=tuple(replace(arm, runs=arm.runs[:count]) for arm in part.arms))
