"""The plan of a study: arms as settings, what its folder holds, what may be added, and what is refused."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace

import pytest
import yaml
from simulated import plan_of
from small_study import flags, plan, settings

from langevin import cli
from langevin.errors import UsageError
from langevin.evaluation.runs import evaluate
from langevin.runs import train
from langevin.studies.plan import FILE, Arm, Claim, Part, Plan, begun, keep, looked, read_plan, settle
from langevin.studies.results import Key, Look

FACTS = {
    "data": {"name": "text.txt", "splits": {"train": {"sha256": "a"}}},
    "commands": ["langevin compare"],
}

ARMS = {
    "softmax": ("softmax", {"mixer": "softmax"}),
    "heat(t=0.28)": ("heat(t=0.28)", {"mixer": "heat(t=0.28)"}),
    "warm=heat(t=0.28)": ("warm", {"mixer": "heat(t=0.28)"}),
    "mdlm=softmax, objective=masked(schedule='linear', steps=2), lr=1e-3": (
        "mdlm",
        {"mixer": "softmax", "objective": "masked(schedule='linear', steps=2)", "lr": 1e-3},
    ),
    "softmax, lr=1e-3": ("softmax, lr=1e-3", {"mixer": "softmax", "lr": 1e-3}),
    "two words=heat(t='head', distance='squared')+drift": (
        "two words",
        {"mixer": "heat(t='head', distance='squared')+drift"},
    ),
    "x=softmax, tie=false, mlp-width=null, layers=3": (
        "x",
        {"mixer": "softmax", "tie": False, "mlp_width": None, "layers": 3},
    ),
    '"heat(t=1)"=ssmax': ("heat(t=1)", {"mixer": "ssmax"}),
    'heat(t="head")': ("heat(t='head')", {"mixer": 'heat(t="head")'}),
}


@pytest.mark.parametrize("text", ARMS)
def test_an_arm_is_a_name_and_settings(text):
    """C13: the arms of version 0.1 were mixers only."""
    arm = Arm.read(text)
    assert (arm.name, arm.changes) == ARMS[text]


def test_a_learning_rate_under_muon_is_that_of_the_matrices_too():
    part = Part(("softmax", "softmax, optimizer=muon"), {"lr": 1e-3, "muon_lr": 0.02})
    plan = Plan((part,), (0,))
    adamw, muon = (plan.at_rate(part, arm, 2e-3).changes for arm in part.read_arms)
    assert adamw == {"mixer": "softmax", "lr": 2e-3}
    assert muon == {"mixer": "softmax", "optimizer": "muon", "lr": 2e-3, "muon_lr": 0.04}


@pytest.mark.parametrize("text", ARMS)
@pytest.mark.parametrize("changes", [{}, {"lr": 5e-5}, {"mlp_width": 31, "init": None}])
def test_the_text_of_an_arm_is_read_as_that_arm(text, changes):
    """Tuned rates and equalised widths are written into it."""
    arm = Arm.read(text).with_(**changes)
    assert Arm.read(arm.text) == arm
    assert Arm.read(arm.text).slug == Arm.read(text).slug


def test_long_names_have_folders_of_their_own():
    slugs = {Arm("x" * count, {"mixer": "softmax"}).slug for count in (300, 301)}
    assert len(slugs) == 2
    assert max(map(len, slugs)) < 100


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        (("softmax", "ssmacs"), "Did you mean 'ssmax'"),
        (("softmax", "softmax"), "softmax comes twice"),
        (("softmax", "standard"), "standard is the same as softmax"),
        (("a=softmax", "a=ssmax"), "a comes twice"),
        (("softmax", "b="), "'b=' is not an arm"),
        (("softmax", "=ssmax"), "'=ssmax' is not an arm"),
        (("softmax", ""), "'' is not an arm"),
        (("softmax", "b=ssmax, lrr=1"), "Did you mean 'lr'"),
        (("softmax", "b=ssmax, lr"), "unknown setting in the arm"),
        (("softmax", "b=ssmax, seed=3"), "unknown setting in the arm"),
        (("softmax", "b=ssmax, data=other"), "unknown setting in the arm"),
        (("softmax", "b=ssmax, lr=fast"), "lr"),
        (("A b=softmax", "a-b=ssmax"), "would share the folder a-b"),
        (("softmax", "report.html=ssmax"), "an arm cannot be called report.html"),
        ((), "no arm came"),
    ],
)
def test_a_wrong_arm_is_one_line(arms, said):
    with pytest.raises(UsageError) as error:
        plan_of(arms)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"primary": "nil"}, "Did you mean 'nll'"),
        ({"primary": "entropy"}, "neither better high nor low"),
        ({"metrics": ("eces",)}, "unknown metric 'eces'"),
        ({"looks": (9, 7)}, "must grow"),
        ({"looks": (0, 7)}, "must grow"),
        ({"looks": (7, 7)}, "must grow"),
        ({"trials": 0}, "trials=0 must be 1 or more"),
        ({"trial_tokens": 0}, "trial_tokens=0 must be 1 or more"),
        ({"test_tokens": 1}, "test_tokens=1 must be 2 or more"),
        ({"margin": -0.1}, "margin=-0.1 must be 0 or more"),
        ({"margin": float("nan")}, "margin=nan must be 0 or more"),
        ({"claims": (Claim("", "", "sima", "nll", "lower"),)}, "unknown arm in a claim"),
        ({"claims": (Claim("", "", "m1", "elo", "lower"),)}, "unknown metric in a claim"),
        ({"claims": (Claim("", "", "m1", "nll", "lower", against="m7"),)}, "unknown arm in a claim"),
        ({"claims": (Claim("", "", "m1", "nll", "lower", part="x"),)}, "unknown part in a claim"),
    ],
)
def test_a_wrong_plan_is_one_line(options, said):
    with pytest.raises(UsageError) as error:
        plan_of(2, 7, **options)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("primary", "base", "objective"),
    [("ece", "ar", "masked"), ("accuracy", "ar", "sparse")],
)
def test_a_primary_that_an_objective_does_not_give_is_refused(tmp_path, primary, base, objective):
    """Such a study would train all arms, and never be judged."""
    arms = f"base=softmax, objective={base}", f"ours=softmax, objective={objective}"
    with pytest.raises(UsageError, match=f"the objective {objective} of ours gives no {primary}"):
        plan(tmp_path, *arms, primary=primary)
    assert plan(tmp_path, primary="ece").primary == "ece"
    for primary in ("left_to_right_nll", "left_to_right_bound"):  # of which a study knows nothing
        with pytest.raises(UsageError, match=f"gives no {primary}"):
            plan(tmp_path, "a=softmax, objective=masked", "b=ssmax, objective=masked", primary=primary)


def test_what_an_objective_does_not_give_is_what_its_evaluations_lack(tmp_path):
    def measured(objective):
        run = train(settings(tmp_path, objective=objective), tmp_path / objective, quiet=True)[0]
        rows = evaluate(run, "test", device="cpu", limit=128, resamples=10)[0]["rows"]
        return {row["metric"] for row in rows}, set(run.task.not_measured(run.objective))

    exact, _ = measured("ar")
    for objective in ("masked", "sparse"):
        found, lacking = measured(objective)
        assert exact - found == lacking - {"left_to_right_nll", "left_to_right_bound"}


def test_seeds_are_each_once_and_not_those_of_tuning():
    with pytest.raises(UsageError, match="each once"):
        Plan((Part(("softmax", "ssmax")),), (1, 1))
    with pytest.raises(UsageError, match="seed 1000 is the one"):
        Plan((Part(("softmax", "ssmax")),), (0, 1000), tune="lr")


@pytest.mark.parametrize(
    ("options", "seeds"),
    [({}, 8), ({"looks": (7, 10, 14)}, 14), ({"looks": (4,)}, 8), ({"parts": 3}, 9)],
)
def test_by_default_there_are_seeds_enough_for_the_family_and_the_looks(options, seeds):
    """C4: the scales of version 0.1 had three seeds and could not answer."""
    assert len(plan_of(3, **options).seeds) == seeds


def test_a_study_of_several_parts_is_one_family():
    one = plan_of(3, parts=2, claims=(Claim("", "", "m1", "ece", "lower", part="part 1"),))
    assert one.family == [
        Key("part 0", "m1", "nll"),
        Key("part 0", "m2", "nll"),
        Key("part 1", "m1", "nll"),
        Key("part 1", "m2", "nll"),
        Key("part 1", "m1", "ece"),
    ]


def test_a_budget_in_minutes_is_not_equal_terms_and_none_is_that_of_training(tmp_path):
    with pytest.raises(UsageError, match="not equal terms"):
        plan(tmp_path, shape={"steps": None, "minutes": 1.0})
    assert plan(tmp_path, shape={"steps": None}).parts[0].config.tokens == 10_000_000


def test_the_trials_are_powers_of_two_about_an_arms_own_rate(tmp_path):
    one = plan(tmp_path, "softmax", "hot=ssmax, lr=1e-2", tune="lr", trials=3)
    rates = [one.learning_rates(one.parts[0], arm) for arm in one.parts[0].read_arms]
    assert rates == [[5e-4, 1e-3, 2e-3], [5e-3, 1e-2, 2e-2]]


# In the folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "cmp").mkdir()
    return tmp_path / "cmp"


def test_a_plan_survives_its_file(folder):
    claims = (Claim("It is.", "0.1", "m1", "ece", "lower", at="trend", size=-0.05),)
    one = plan_of(3, parts=2, looks=(7, 9), margin=0.01, claims=claims, notes=("one",), tune="lr")
    settle(one, folder, FACTS)
    again, facts = read_plan(folder)
    assert again == one
    assert facts["data"] == FACTS["data"]
    assert json.loads(json.dumps(one.as_dict())) == one.as_dict()


def test_the_same_plan_goes_on_and_a_changed_one_is_refused_with_the_first_difference(tmp_path, folder):
    one = plan(tmp_path)
    first = settle(one, folder, FACTS)
    assert settle(one, folder, {**FACTS, "commands": ["another"]}) == first
    for changed, said in (
        (plan(tmp_path, shape={"lr": 2e-3}), r"planned with parts\.0\.settings\.lr=0.001, not 0.002"),
        (plan(tmp_path, "softmax", "sima"), r"planned with parts\.0\.arms\.1='ssmax', not 'sima'"),
        (plan(tmp_path, seeds=(0,)), r"planned with seeds"),
        (plan(tmp_path, seeds=(0, 2)), r"planned with seeds"),
        (plan(tmp_path, primary="perplexity"), "planned with metrics|planned with primary"),
        (plan(tmp_path, margin=0.1), "planned with margin=None, not 0.1"),
        (plan(tmp_path, looks=(7, 9)), "planned with looks"),
    ):
        with pytest.raises(UsageError, match=said):
            settle(changed, folder, FACTS)
    other = {**FACTS, "data": {**FACTS["data"], "splits": {"train": {"sha256": "b"}}}}
    with pytest.raises(UsageError, match=r"planned with data\.splits\.train\.sha256='a', not 'b'"):
        settle(one, folder, other)


def test_what_changes_no_number_and_where_the_data_are_may_change(tmp_path, folder):
    settle(plan(tmp_path), folder, FACTS)
    moved = {"checkpoint_every": 3, "keep": 1, "data": "/elsewhere/text.txt"}
    settle(plan(tmp_path, shape=moved), folder, FACTS)


def test_seeds_can_be_added_and_the_looks_that_were_stay(tmp_path, folder):
    facts = settle(plan(tmp_path, seeds=(1, 2)), folder, FACTS)
    keep(folder, {**facts, "looks": [{"seeds": [1, 2], "missing": [["", "ssmax", 2]]}]})
    grown = settle(plan(tmp_path, seeds=(0, 1, 2)), folder, {**FACTS, "commands": ["more"]})
    assert grown["plan"]["seeds"] == [0, 1, 2]
    assert grown["commands"] == ["more"]
    assert looked(grown) == (Look((1, 2), (("", "ssmax", 2),)),)
    assert begun(folder) == grown


def test_seeds_come_after_those_of_a_declared_look(tmp_path, folder):
    """Put before them, they would change what the look saw."""
    settle(plan(tmp_path, seeds=(1, 2), looks=(2, 3)), folder, FACTS)
    with pytest.raises(UsageError, match=r"planned with seeds=\[1, 2\], not \[0, 1, 2\]"):
        settle(plan(tmp_path, seeds=(0, 1, 2), looks=(2, 3)), folder, FACTS)
    settle(plan(tmp_path, seeds=(1, 2, 0), looks=(2, 3)), folder, FACTS)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(UsageError, match=r"holds something else|is a file"):
            begun(place)
    with pytest.raises(UsageError, match="is no plan"):
        read_plan(tmp_path / "none.yaml")


def damaged(values, rng):
    """The same, with something else in one place."""
    if isinstance(values, dict) and values and rng.random() < 0.9:
        key = rng.choice(list(values))
        if rng.random() < 0.1:
            return {k: v for k, v in values.items() if k != key}
        return {**values, key: damaged(values[key], rng)}
    if isinstance(values, list) and values and rng.random() < 0.8:
        i = rng.randrange(len(values))
        return [*values[:i], damaged(values[i], rng), *values[i + 1 :]]
    return rng.choice([None, 3, -1.5, "x", [], {}, [1], {"a": 1}, True, [[1, 2]], "\N{SNOWMAN}" * 3])


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_plan_is_read_or_refused_in_one_line(seed, tmp_path):
    one = plan(tmp_path, claims=(Claim("It is.", "0.1", "ssmax", "ece", "lower"),), margin=0.1)
    facts = {"plan": one.as_dict(), **FACTS, "looks": [{"seeds": [0, 1], "missing": [["", "ssmax", 1]]}]}
    bad = damaged(facts, random.Random(seed))
    (tmp_path / FILE).write_text(yaml.safe_dump(bad))
    with contextlib.suppress(UsageError):
        read, found = read_plan(tmp_path)
        looked(found)
        assert isinstance(read, Plan)


@pytest.mark.parametrize(
    "text", ["", "[", "plan: 1", "{plan: {}, data: {}, commands: []}", "\x00", "- " * 3000]
)
def test_a_file_that_is_no_plan_is_refused_in_one_line(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UsageError) as error:
        read_plan(tmp_path)
    assert len(str(error.value).splitlines()) <= 2


# On the command line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["softmax", "ssmacs"], "Did you mean 'ssmax'"),
        (["softmax"], "1 arm came"),
        ([], "no arms came"),
        (["softmax", "softmax"], "softmax comes twice"),
        (["softmax", "b=ssmax, lrr=2"], "Did you mean 'lr'"),
        (["softmax", "ssmax", "--seeds", "0-"], "names no seeds"),
        (["softmax", "ssmax", "--seeds", "1,1"], "each once"),
        (["softmax", "ssmax", "--minutes", "1"], "not equal terms"),
        (["softmax", "ssmax", "--primary", "nil"], "Did you mean 'nll'"),
        (["softmax", "ssmax", "--metrics", "eces"], "unknown metric 'eces'"),
        (["softmax", "ssmax", "--mixer", "heat"], "--mixer does not fit compare"),
        (["softmax", "ssmax", "--seed", "3"], "--seed does not fit compare"),
        (["softmax", "ssmax", "--trials", "0"], "trials=0 must be 1 or more"),
        (["softmax", "ssmax", "--tune", "lr", "--seeds", "1000"], "seed 1000 is the one"),
        (["softmax", "ssmax", "--looks", "7,x"], "names no numbers of seeds"),
        (["softmax", "ssmax", "--looks", "9,7"], "must grow"),
        (["softmax", "ssmax", "--margin", "-1"], "margin=-1.0 must be 0 or more"),
        (["softmax", "ssmax", "--workers", "-1"], "workers"),
        (["softmax", "b=ssmax, objective=nope"], "nope"),
        (["softmax", "ssmax", "--init", "nowhere"], "nowhere"),
        (["softmax", "ssmax", "--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_a_wrong_comparison_is_one_line_of_cause_and_one_of_remedy(arguments, said, capsys, tmp_path):
    assert cli.main(["compare", *arguments, "--out", str(tmp_path / "x")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in "\n".join(lines)
    assert len(lines) <= 2
    assert not (tmp_path / "x").exists()


def test_a_plan_makes_its_comparison_again(tmp_path, folder, monkeypatch, capsys):
    """compare --config takes the arms, options and settings of a compare.yaml; flags go first."""
    made = []
    monkeypatch.setattr("langevin.studies.compare.compare", lambda plan, folder, **how: made.append(plan))
    monkeypatch.setattr("langevin.cli.studies._made", lambda work, *rest: work() or 0)
    arms = ["softmax", "mdlm=heat(t='head'), lr=0.01"]
    options = ["--seeds", "0-6", "--looks", "6,7", "--margin", "0.1", "--tune", "lr", "--trials", "3"]
    assert cli.main(["compare", *arms, *flags(tmp_path), *options]) == 0
    settle(made[0], folder, FACTS)
    assert cli.main(["compare", "--config", str(folder)]) == 0
    assert cli.main(["compare", f"--config={folder / FILE}", "--tokens", "256", "--seeds", "3"]) == 0
    assert made[1] == made[0]
    changed = made[2].parts[0].config
    assert (changed.tokens, changed.steps, made[2].seeds) == (256, None, (3,))
    parts = replace(made[0].parts[0], name="a"), replace(made[0].parts[0], name="b")
    (tmp_path / "recipe").mkdir()
    settle(replace(made[0], parts=parts), tmp_path / "recipe", FACTS)
    assert cli.main(["compare", "--config", str(tmp_path / "recipe")]) == 2
    assert "was made by langevin reproduce" in capsys.readouterr().err
    assert cli.main(["compare", "--config", str(tmp_path / "none.yaml")]) == 2


def test_settings_of_the_plan_are_those_of_training(tmp_path):
    one = plan(tmp_path, "softmax", "b=ssmax, lr=1e-2")
    part = one.parts[0]
    first, second = (one.config(part, arm, 3) for arm in part.read_arms)
    assert first == settings(tmp_path, seed=3)
    assert second == settings(tmp_path, seed=3, mixer="ssmax", lr=1e-2)
