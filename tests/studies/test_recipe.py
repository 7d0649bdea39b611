"""Recipes: strict files, one plan a scale, and seeds enough to answer."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from langevin.bench.edge import bench_edge
from langevin.errors import UsageError
from langevin.models.cost import flops_of
from langevin.models.heads import LangevinForSequenceClassification
from langevin.studies import recipe as recipes
from langevin.studies.inference import least_seeds
from langevin.studies.plan import Claim, _plain
from langevin.studies.recipe import SCALES
from langevin.training.start import model_config

NAMES = [
    "ar-vs-diffusion",
    "cifar10-vit",
    "drift-diffusion-gpt2",
    "heat-calibration",
    "heat-depth-law",
    "length-generalisation",
    "needle",
    "neighbor-classification",
    "neighbor-listops",
    "neighbor-listops-nyu",
    "neighbor-memory",
    "speed",
    "ssmax-text8",
    "swap-softmax",
]
COSTS = ["neighbor-memory", "speed"]
TRAINING = [name for name in NAMES if name not in COSTS]
ONE_SEED = ["neighbor-listops"]  # which says that it judges nothing


def test_the_recipes_are_these():
    assert recipes.names() == NAMES


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", TRAINING)
def test_every_scale_of_a_recipe_is_a_plan_with_its_claims(name, scale):
    found = recipes.recipe(name)
    plan = found.plan(scale)
    assert plan.primary
    assert plan.title == found.title
    assert plan.notes == found.differs
    assert all(len(part.arms) > 1 for part in plan.parts)
    assert plan.claims
    assert not any(
        "{" in text for claim in plan.claims for text in (claim.claim, claim.published, claim.arm)
    )
    assert found.cost.count(";") == 2


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("name", [name for name in TRAINING if name not in ONE_SEED])
def test_small_and_full_have_seeds_enough_to_be_judged(name, scale):
    """C4: at small the recipes of version 0.1 had three seeds, so nothing was judged."""
    plan = recipes.recipe(name).plan(scale)
    assert len(plan.seeds) >= least_seeds(len(plan.family))


def test_small_takes_half_an_hour_at_most():
    for name in NAMES:
        cost = recipes.recipe(name).scale("small").cost
        assert int(re.fullmatch(r"(?:about )?(\d+) minutes on one H200", cost)[1]) <= 30


@pytest.mark.parametrize("scale", SCALES)
def test_what_the_recipe_of_speed_measures_is_known(scale):
    benches = recipes.recipe("speed").scale(scale).benches
    assert benches.mixers.repeats >= 3
    assert benches.training.layers >= 1


@pytest.mark.parametrize("scale", SCALES)
def test_what_the_recipe_of_memory_measures_is_known(scale):
    benches = recipes.recipe("neighbor-memory").scale(scale).benches
    assert set(benches.edge) <= set(inspect.signature(bench_edge).parameters)
    assert benches.training.layers >= 1


def cost_of(config):
    """Parameters but for those of embeddings, and FLOPs a token."""
    with torch.device("meta"):
        model = LangevinForSequenceClassification(model_config(config, vocab_size=2, num_labels=2))
    return sum(p.numel() for p in model.parameters()), flops_of(model, config.context)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["neighbor-classification", "neighbor-listops", "neighbor-listops-nyu"])
def test_arms_that_say_so_have_equal_parameters_or_equal_flops(name, scale):
    plan = recipes.recipe(name).plan(scale)
    for part in plan.parts:
        cost = {arm.name: cost_of(plan.config(part, arm, 0)) for arm in part.read_arms}
        for arm, which in (("published", 0), ("softmax", 0), ("softmax of equal FLOPs", 1)):
            if arm in cost:
                assert cost[arm][which] / cost["neighbor"][which] == pytest.approx(1, abs=0.01), arm


@pytest.mark.parametrize("name", ["heat-calibration", "heat-depth-law"])
def test_the_fixed_times_are_those_of_the_depth_law(name):
    for scale in SCALES:
        for part in recipes.recipe(name).plan(scale).parts:
            law = round(0.28 * math.sqrt(4 / part.config.layers), 2)
            assert f"heat(t={law:g})" in [arm.changes["mixer"] for arm in part.read_arms[:2]]


def test_a_trend_is_claimed_once_of_the_whole_and_only_of_several_parts():
    plan = recipes.recipe("heat-calibration").plan("small")
    (trend,) = [claim for claim in plan.claims if claim.at == "trend"]
    assert trend.part == ""
    assert {claim.part for claim in plan.claims} == {"", "4 layers", "12 layers"}
    # an arm that a part does not have is not asked for there
    assert [claim.part for claim in plan.claims if claim.arm == "adaptive"] == ["4 layers"]


def text_of(**changes):
    """A recipe as YAML; a change to None leaves the key out."""
    scale = {"cost": "nothing", "seeds": [0, 1], "settings": {"steps": 2}}
    claim = {"claim": "It is lower.", "published": "1 against 2", "arm": "ssmax", "metric": "nll"}
    values = {
        "name": "mine",
        "title": "Mine",
        "retests": "nothing",
        "source": "nowhere",
        "arms": ["softmax", "ssmax"],
        "claims": [{**claim, "expect": "lower"}],
        "scales": {name: dict(scale) for name in SCALES},
        **changes,
    }
    return yaml.safe_dump({k: v for k, v in values.items() if v is not None}, sort_keys=False)


def test_a_plain_recipe_is_read():
    found = recipes.read(text_of(), "mine")
    assert found.claims == (Claim("It is lower.", "1 against 2", "ssmax", "nll", "lower"),)
    assert found.plan("full", (4, 5, 6)).seeds == (4, 5, 6)
    assert found.plan("full").seeds == (0, 1)


def test_a_scale_without_seeds_has_as_many_as_it_needs():
    scales = {name: {"cost": "nothing", "settings": {"steps": 2}} for name in SCALES}
    assert len(recipes.read(text_of(scales=scales), "mine").plan("small").seeds) == 7


@pytest.mark.parametrize(
    ("of_recipe", "of_scale"),
    [
        ({"equal_flops": True}, {"equal_flops": False}),  # what would be so without a word
        ({"tune": "lr", "trials": 3}, {"trials": 5}),
        ({"test_tokens": 1000}, {"test_tokens": 65_536}),
        ({"judge": "x", "temperatures": [0.5, 0.6]}, {"temperatures": [0.7, 0.8, 0.9, 1.0]}),
        ({"judge": "x", "sampling": {"steps": 3}}, {"sampling": {}}),
    ],
)
def test_what_a_scale_says_goes_before_what_its_recipe_does(of_recipe, of_scale):
    scales = scales_with(settings={"steps": 2})
    scales["full"] |= of_scale
    found = recipes.read(text_of(scales=scales, **of_recipe), "mine")
    small, full = (_plain(vars(found.plan(name))) for name in ("small", "full"))
    assert {key: small[key] for key in of_recipe} == of_recipe
    assert {key: full[key] for key in of_recipe} == {**of_recipe, **of_scale}


def test_the_recipe_in_the_documentation_is_one():
    page = (Path(__file__).parents[2] / "docs" / "reproducing.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert len(recipes.read(example, "mine").plan("full").parts) == 1


def scales_with(**changes):
    return {name: {"cost": "nothing", "seeds": [0], **changes} for name in SCALES}


def claims_with(**changes):
    claim = {"claim": "It is lower.", "published": "-", "metric": "nll", "arm": "ssmax", "expect": "lower"}
    return [{**claim, **changes}]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"titel": "Mine"}, "unknown key in recipe mine 'titel'"),
        ({"title": None}, "recipe mine has no title"),
        ({"title": 3}, "title must be a string"),
        ({"arms": "softmax"}, "arms must be a list"),
        ({"settings": {"layer": 2}}, "'layer'"),
        ({"settings": {"layers": "two"}}, "layers"),
        ({"settings": [1]}, "settings must be a table"),
        ({"scales": scales_with(sedes=[1])}, "'sedes'"),
        ({"scales": scales_with(seeds=[0, 0])}, "each once"),
        ({"scales": scales_with(seeds=["one"])}, "seeds"),
        ({"scales": scales_with(parts=[{"nam": "x"}])}, "'nam'"),
        ({"scales": scales_with(benches={"training": {"layer": 2}, "vocab": 9, "rounds": 1})}, "'layer'"),
        ({"scales": {"smoke": {"cost": "nothing", "seeds": [0]}}}, "has the scales smoke"),
        ({"arms": ["softmax", "ssmaxx"]}, "ssmaxx"),
        (
            {"scales": scales_with(parts=[{"values": {"x": "1"}, "arms": ["a=heat(t={t})", "b=ssmax"]}])},
            "'t'",
        ),
        ({"metrics": ["elo"]}, "unknown metric 'elo'"),
        ({"claims": claims_with(kind="vote")}, "'kind'"),
        ({"claims": claims_with(arm="sima")}, "sima"),
        ({"claims": claims_with(metric="brie")}, "unknown metric in a claim 'brie'"),
        ({"claims": claims_with(expect="nicer")}, "expect"),
        ({"claims": claims_with(against="sima")}, "unknown arm in a claim 'sima'"),
        ({"tune": "everything"}, "tune"),
        ({"name": "other"}, "calls itself 'other'"),
    ],
)
def test_a_recipe_with_a_mistake_is_refused_in_one_line(changes, cause):
    with pytest.raises(UsageError) as error:
        recipes.read(text_of(**changes), "mine")
    assert cause in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize("text", ["", "[", "- 1", "name: mine", "name: [", "a: 1\na: 2", "\t"])
def test_a_file_that_is_no_recipe_is_refused_in_one_line(text):
    with pytest.raises(UsageError) as error:
        recipes.read(text, "mine")
    assert len(str(error.value).splitlines()) <= 2
