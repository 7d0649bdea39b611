"""langevin compare: equal terms, one folder, and an end that is the same whatever happened on the way."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_study import arms_in, compared, flags, plan, results_in, text_in, timeless

from langevin import cli
from langevin.errors import UsageError, WorkError
from langevin.runs import load
from langevin.runs.folder import Lock
from langevin.studies import compare, jobs, terms, work
from langevin.studies.plan import FILE, keep, read_plan
from langevin.studies.results import Key
from langevin.tasks import TASKS
from langevin.training import loop
from models.tiny_models import tiny


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A finished comparison with one seed."""
    home = tmp_path_factory.mktemp("single")
    compared(plan(home, seeds=(0,)), home / "cmp")
    return home


# What is in it


def test_every_arm_has_a_run_for_every_seed_with_rows_curve_and_costs(made):
    results, folder = made
    (part,) = results.parts
    assert [arm.name for arm in part.arms] == ["softmax", "again", "ssmax"]
    for arm in part.arms:
        assert [run.seed for run in arm.runs] == [0, 1]
        for run in arm.runs:
            assert run.status == "done"
            assert all(run.row(metric.name) is not None for metric in results.metrics)
            assert [point.amount for point in run.curve] == [4 * 64, 8 * 64]
            assert run.details["sample"]["prompt"]
        costs = {row.metric: row for row in arm.costs}
        assert {row.kind for row in arm.costs} == {"cost"}
        assert costs["state_bytes"].value == 2 * 16 * 16 * 4  # keys and values, 16 tokens of 16 floats
        assert costs["parameters"].value > 7000
        assert (folder / arm.name / "seed-0" / "done.json").is_file()
    assert results.unit == "tokens"


def test_costs_that_are_times_come_in_turns_with_an_interval(made):
    """C8: costs were bare point ratios."""
    results, _ = made
    softmax, again, _ = results.parts[0].arms
    for name in ("time_ratio", "decode_ratio"):
        row = again.cost(name)
        assert row.low < row.value < row.high
        assert softmax.cost(name).value == 1
    told = " ".join([results.verdict.answer, results.verdict.sure, *results.verdict.more])
    assert "tokens/s" not in told


def test_an_arm_under_another_name_has_the_same_results(made):
    results, _ = made
    first, again, other = results.parts[0].arms
    for mine, same, else_ in zip(first.runs, again.runs, other.runs, strict=True):
        assert mine.rows == same.rows
        assert mine.rows != else_.rows
    found = results.contrast(Key("", "again", "nll"))
    assert (found.difference, found.p) == (0, 1)


def test_arms_see_the_same_data_order_and_the_same_budget(made):
    _, folder = made
    configs = [load(folder / arm / "seed-1").config for arm in ("softmax", "again", "ssmax")]
    assert len({replace(config, mixer="softmax") for config in configs}) == 1


def test_results_json_is_the_results(made):
    results, folder = made
    written = results_in(folder)
    assert written["verdict"]["answer"] == results.verdict.answer
    assert written["seeds"] == [0, 1]
    assert [m["name"] for m in written["metrics"]] == [m.name for m in results.metrics]
    assert len(written["contrasts"]) == len(results.contrasts)
    assert written["exploratory"] == ""
    assert read_plan(folder)[0].parts[0].arms == ("softmax", "again=softmax", "ssmax")
    assert (folder / "report.html").is_file()


def test_too_few_seeds_are_not_judged_and_the_look_is_free(made):
    results, folder = made
    assert (
        results.verdict.answer
        == "Cannot be judged: 2 pairs of runs cannot confirm a difference; it takes 7."
    )
    assert "looks" not in read_plan(folder)[1]


def test_a_finished_comparison_is_only_read_again(made, monkeypatch):
    _, folder = made
    before = (folder / "results.json").read_bytes()
    monkeypatch.setattr(jobs, "execute", lambda job: pytest.fail("it worked again"))
    compared(plan(folder.parent, "softmax", "again=softmax", "ssmax"), folder)
    assert (folder / "results.json").read_bytes() == before


# Arms and terms


def test_arms_can_differ_in_anything_that_training_takes(tmp_path):
    """C13: arms were mixers only."""
    one = plan(tmp_path, "softmax", "narrow=ssmax, mlp_width=8, lr=1e-2", seeds=(0,))
    results = compared(one, tmp_path / "cmp")
    config = load(tmp_path / "cmp" / "narrow" / "seed-0").config
    assert (config.mixer, config.mlp_width, config.lr) == ("ssmax", 8, 1e-2)
    lines = " ".join(results.not_controlled)
    assert "Settings of their own besides the mixer: narrow (mlp_width 8, lr 0.01)." in lines
    assert "not the same parameters: narrow" in lines


def test_tuning_gives_every_arm_the_same_trials_and_takes_the_best_on_validation(tmp_path):
    arms = ("softmax", "heat(t=0.28)")
    one = plan(tmp_path, *arms, seeds=(0,), tune="lr", trials=2, trial_tokens=256)
    results = compared(one, tmp_path / "cmp")
    for arm in results.parts[0].arms:
        assert arm.name in arms
        assert [trial.lr for trial in arm.tuning] == [1e-3, 2e-3]
        best = min(arm.tuning, key=lambda trial: trial.loss)
        assert arm.settings["lr"] == best.lr
    run = load(tmp_path / "cmp" / "heat-t-0.28" / "seed-0")
    assert run.config.lr == results.parts[0].arms[1].settings["lr"]
    trial = load(tmp_path / "cmp" / "softmax" / "tune" / "lr-0.002").config
    assert trial.seed not in one.seeds
    assert (trial.tokens, trial.steps) == (256, None)
    (line,) = [line for line in results.not_controlled if "one seed that is not judged" in line]
    assert "2 trials of 256 tokens" in line
    assert "too large a rate for a run" in line
    assert timeless(tmp_path / "cmp") == again(one, tmp_path / "cmp")


def again(one, folder):
    compared(one, folder)
    return timeless(folder)


def test_a_trial_that_diverges_does_not_fail_the_study(tmp_path):
    """C10: one diverged tuning trial made compare exit 1 for ever."""
    wild = "wild=ssmax, lr=1e15"
    one = plan(tmp_path, "softmax", wild, seeds=(0,), tune="lr", trials=1, shape=DIVERGING)
    results = compared(one, tmp_path / "cmp")
    first, second = results.parts[0].arms
    assert first.tuning[0].loss > 0
    assert second.tuning[0].loss is None
    assert second.settings["lr"] == 1e15  # all diverged: it keeps its own
    assert [arm.runs[0].status for arm in (first, second)] == ["done", "diverged"]


DIVERGING = {"clip": 1e9, "max_bad_steps": 2}


def test_a_trial_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    one = plan(tmp_path, seeds=(0,), tune="lr", trials=1)
    whole = work.prepared

    def fails(config, *rest, **more):
        if config.mixer == "ssmax":
            raise RuntimeError("out of memory")
        return whole(config, *rest, **more)

    monkeypatch.setattr(work, "prepared", fails)
    with pytest.raises(WorkError, match=r"1 of 2 trials failed: ssmax lr 0\.001"):
        compared(one, tmp_path / "cmp")
    monkeypatch.setattr(work, "prepared", whole)
    assert compared(one, tmp_path / "cmp").finished


def test_differences_in_parameters_are_told_and_can_be_made_equal(tmp_path):
    arms = ("softmax", "neighbor(iters=2)")
    one = plan(tmp_path, *arms, seeds=(0,), shape={"width": 32}, equalise=True)
    results = compared(one, tmp_path / "cmp")
    first, second = results.parts[0].arms
    assert second.name == "neighbor(iters=2)"
    assert second.settings.keys() == {"mixer", "mlp_width"}
    assert second.cost("parameters").value == pytest.approx(first.cost("parameters").value, rel=0.01)
    assert not any("not the same parameters" in line for line in results.not_controlled)
    assert timeless(tmp_path / "cmp") == again(one, tmp_path / "cmp")


def test_arms_can_have_equal_flops_instead_of_equal_tokens(tmp_path):
    one = plan(tmp_path, "softmax", "neighbor", seeds=(0,), equal_flops=True)
    results = compared(one, tmp_path / "cmp")
    first, second = results.parts[0].arms
    spent = [arm.cost("flops_per_token").value * arm.runs[0].curve[-1].amount for arm in (first, second)]
    assert second.runs[0].curve[-1].amount < first.runs[0].curve[-1].amount
    assert spent[1] == pytest.approx(spent[0], rel=0.1)  # a budget is whole steps
    assert any("equal training FLOPs" in line for line in results.not_controlled)
    assert not any("not the same training FLOPs" in line for line in results.not_controlled)
    assert timeless(tmp_path / "cmp") == again(one, tmp_path / "cmp")


def test_trials_of_arms_with_equal_flops_are_the_same_part_of_their_runs(tmp_path):
    arms = ("softmax", "half=softmax, steps=2", "other=ssmax")
    one = plan(tmp_path, *arms, tune="lr", trials=1, trial_tokens=192)
    trials = {job.label: job.arguments["config"] for job in compare._trials(one, tmp_path)}
    runs = [one.config(one.parts[0], arm, 0).steps for arm in one.parts[0].read_arms]
    assert [config.tokens for config in trials.values()] == [192 * steps // runs[0] for steps in runs]
    assert trials["half lr 0.001"].tokens < 192


def test_trials_of_an_arm_with_smaller_batches_have_no_more_tokens(tmp_path):
    """A fourth of the tokens in as many steps is a fourth of the budget, in trials as well."""
    arms = ("softmax", "small=softmax, batch=1")
    one = plan(tmp_path, *arms, tune="lr", trials=1, trial_tokens=256)
    assert [job.arguments["config"].tokens for job in compare._trials(one, tmp_path)] == [256, 64]


def test_a_page_written_again_has_the_sizes_of_a_study_that_was_never_timed(single, tmp_path):
    records_only(single / "cmp", tmp_path / "cmp")
    (tmp_path / "cmp" / "costs.json").unlink()
    for arm in compare.report_again(tmp_path / "cmp", None, "").parts[0].arms:
        assert arm.cost("parameters").value > 0
        assert arm.cost("flops_per_token").value > 0


def test_a_study_begun_before_sizes_were_kept_has_them_once_it_goes_on(single, tmp_path):
    records_only(single / "cmp", tmp_path / "cmp")
    facts = read_plan(tmp_path / "cmp")[1]
    keep(tmp_path / "cmp", {name: value for name, value in facts.items() if name != "sizes"})
    text_in(tmp_path)
    compared(plan(tmp_path, seeds=(0,)), tmp_path / "cmp")
    assert read_plan(tmp_path / "cmp")[1] == facts


def test_equal_flops_are_those_of_the_first_arm_whatever_budgets_arms_name(tmp_path):
    arms = ("first=softmax, steps=4", "masked=softmax, objective=masked", "long=softmax, steps=100")
    one = plan(tmp_path, *arms, equal_flops=True)
    sizes = terms.all_sizes(one, [TASKS.parse("lm").prepare(one.parts[0].config)])
    equal = terms.equal_in_flops(one, sizes)
    (part,) = equal.parts
    budgets = {arm.name: terms.budget(equal.config(part, arm, 0)) for arm in part.read_arms}
    assert budgets["first"] == budgets["long"] == 4 * 4 * 16
    spent = [budgets[name] * sizes["", name][1].value for name in budgets]
    assert spent == pytest.approx([spent[0]] * 3, rel=0.01)
    assert terms.equal_in_flops(equal, sizes) == equal


def test_arms_that_cannot_be_made_equal_are_refused(tmp_path):
    shape = {"width": 16, "heads": 4, "mlp_width": 2}
    small = plan(tmp_path, "softmax", "neighbor", shape=shape, equalise=True)
    with pytest.raises(UsageError, match="no width brings neighbor within 1 %"):
        terms.equalised(small, [TASKS.parse("lm").prepare(small.parts[0].config)])


def test_a_cpu_takes_a_run_a_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)

    def workers(plan_, asked=None):
        sizes = {("", arm.name): [] for arm in plan_.parts[0].read_arms}
        return terms.workers_for(plan_, sizes, [], "cpu", asked)

    assert workers(plan(tmp_path)) == 4  # as many as there are runs
    assert workers(plan(tmp_path, seeds=tuple(range(9)))) == 8
    assert workers(plan(tmp_path), 3) == 3


def test_a_gpu_takes_more_runs_where_a_service_merges_them(tmp_path, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 37)
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    many = plan(tmp_path, seeds=tuple(range(9)))
    sizes = {("", a.name): [SimpleNamespace(value=1e5)] * 2 for a in many.parts[0].read_arms}

    def workers():
        return terms.workers_for(many, sizes, [SimpleNamespace(vocab_size=256)], "cuda", None)

    assert workers() == 4
    (tmp_path / "control").touch()
    assert workers() == 9
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert workers() == 10


def test_a_study_of_examples_is_compiled_by_the_tokens_of_these(tmp_path):
    """On a GPU, where compiling pays from so many FLOPs on: a budget of examples is none of tokens."""
    shape = {"context": 100, "batch": 2, "steps": 10, "layers": 1, "width": 16, "heads": 2}
    words = SimpleNamespace(vocab_size=10 * terms.LARGE)

    def said(task, flops):
        one = plan(tmp_path, "softmax", seeds=(0,), shape={**shape, "task": task})
        sizes = {("", "softmax"): [SimpleNamespace(value=1), SimpleNamespace(value=flops)]}
        return terms._worth_compiling(one, one.parts[0], sizes, words)

    enough = 1.01 * terms.WORTH / (10 * 2 * 100)
    assert [said(task, enough) for task in ("lm", "classify")] == ["on", "on"]
    assert [said(task, enough / 1.1) for task in ("lm", "classify")] == ["loss", "off"]


def test_metrics_at_a_matched_loss_come_from_models_on_the_way_that_are_not_kept(tmp_path):
    """C1: per pair of arms."""
    results = compared(plan(tmp_path, seeds=(0,), along=True), tmp_path / "cmp")
    runs = [arm.runs[0] for arm in results.parts[0].arms]
    assert [row.at for run in runs for row in run.rows if row.metric == "nll"] == [
        {},
        {"step": 4},
        {"step": 8},
    ] * 2
    worst, best = sorted(runs, key=lambda run: -run.best.loss)
    assert worst.value_at("nll", worst.best.loss) == pytest.approx(worst.row("nll").value, rel=1e-6)
    assert best.value_at("nll", worst.best.loss) >= best.row("nll").value
    assert results.contrast(Key("", "ssmax", "ece", "matched")).difference is not None
    assert not list((tmp_path / "cmp").glob("*/seed-0/evaluated"))
    assert not list((tmp_path / "cmp").glob("*/seed-0/checkpoints"))


# A pretrained model, swapped


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    tiny("llama", vocab_size=257).save_pretrained(folder)
    return str(folder)


def test_arms_start_from_the_same_pretrained_weights_beside_the_untouched_model(tmp_path, pretrained):
    shape = {"init": pretrained, "steps": 4, "eval_every": 2, "layers": 4, "width": 128, "heads": 4}
    one = plan(tmp_path, "softmax", "ssmax", "taught=ssmax, objective=distill", seeds=(0,), shape=shape)
    results = compared(one, tmp_path / "cmp")
    (part,) = results.parts
    assert part.untouched.status == "done"
    assert part.untouched.row("nll").value > 0
    assert results.within == 0.05
    assert "Within 0.05 of the untouched model's loss came " in " ".join(results.verdict.more)
    assert load(tmp_path / "cmp" / "taught" / "seed-0").config.objective == "distill"
    for arm in part.arms:
        assert arm.runs[0].curve[-1].amount == 4 * 64
    assert timeless(tmp_path / "cmp") == again(one, tmp_path / "cmp")


# Failure and divergence


def test_a_failed_run_is_told_and_tried_again_and_sinks_no_other(tmp_path, monkeypatch, capsys):
    whole = work.measured

    def fails_once(run, *rest, **more):
        if run.config.mixer == "ssmax" and run.config.seed == 1:
            raise RuntimeError("the disk is full\nat /tmp")
        return whole(run, *rest, **more)

    monkeypatch.setattr(work, "measured", fails_once)
    out = tmp_path / "cmp"
    command = ["compare", "softmax", "ssmax", *flags(tmp_path), "--seeds", "0-1", "--out", str(out)]
    command += ["--workers", "0", "--quiet"]
    assert cli.main(command) == 1
    assert "1 runs failed: ssmax seed 1; the same command tries them again" in capsys.readouterr().out
    failed = arms_in(out)[1]["runs"][1]
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: the disk is full")
    assert (out / "report.html").is_file()
    monkeypatch.setattr(work, "measured", whole)
    assert cli.main(command) == 0
    assert arms_in(out)[1]["runs"][1]["status"] == "done"
    assert not list(out.rglob("*failed.json"))


def test_a_run_that_diverges_is_a_record_and_no_failure(tmp_path, monkeypatch, capsys):
    """C5, C10: it was dropped from the comparison, and tried again for ever."""
    out = tmp_path / "cmp"
    command = ["compare", "softmax", "wild=ssmax, lr=1e15", *flags(tmp_path, **DIVERGING)]
    command += ["--seeds", "0", "--out", str(out), "--workers", "0", "--quiet"]
    assert cli.main(command) == 0
    assert "Runs of wild diverged" in capsys.readouterr().out
    record = json.loads((out / "wild" / "seed-0" / "done.json").read_text())
    assert record["status"] == "diverged"
    assert "\n" not in record["error"]
    assert arms_in(out)[1]["runs"][0]["status"] == "diverged"
    monkeypatch.setattr(jobs, "execute", lambda job: pytest.fail("it was tried again"))
    assert cli.main(command) == 0


# Killed, and started again


MOMENTS = {
    "while the plan is written": (compare, "settle", 1),
    "in the middle of the second run": (loop.Trainer, "_compute", 8 + 5),
    "while it is measured": (work, "sample", 2),
    "before a record is written": (jobs, "write_json", 2),
    "between runs": (work, "run", 2),
    "in a page on the way": (compare, "write_report", 1),
    "before the costs": (work, "in_turns", 1),
    "before the last page": (compare._Study, "conclude", 1),
}


def dies(one, folder, where, name, count, **how) -> None:
    """The comparison in a process that is gone, without a word, at the count-th call of a function."""
    child = os.fork()
    if child == 0:
        whole, calls = getattr(where, name), iter(range(1, 10_000))

        def last(*place, **words):
            if next(calls) == count:
                os._exit(9)
            return whole(*place, **words)

        setattr(where, name, last)
        with contextlib.suppress(BaseException):
            compared(one, folder, **how)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    home = tmp_path_factory.mktemp("whole")
    one = plan(home, seeds=(0,), shape=OFTEN, along=True)
    compared(one, home / "cmp")
    return one, timeless(home / "cmp")


OFTEN = {"checkpoint_every": 2, "dropout": 0.1}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_study_killed_anywhere_and_started_again_has_the_same_results(moment, whole, tmp_path):
    one, expected = whole
    dies(one, tmp_path / "cmp", *MOMENTS[moment])
    compared(one, tmp_path / "cmp")
    assert timeless(tmp_path / "cmp") == expected


def test_one_folder_takes_one_comparison_at_a_time(tmp_path):
    (tmp_path / "cmp").mkdir()
    with Lock(tmp_path / "cmp"), pytest.raises(UsageError, match="is being written by"):
        compared(plan(tmp_path, seeds=(0,)), tmp_path / "cmp")


def test_a_page_on_the_way_has_curves_and_no_verdict_and_reloads_itself(tmp_path, whole):
    one, _ = whole
    dies(one, tmp_path / "cmp", work, "run", 2)
    study = compare._Study(one, tmp_path / "cmp", read_plan(tmp_path / "cmp")[1], compare.Display(True))
    study._write()
    written = results_in(tmp_path / "cmp")
    assert written["verdict"]["answer"] == "No answer yet: 1 of 2 runs have ended."
    assert all(c["p"] is None and c["state"] == "not judged" for c in written["contrasts"])
    assert 'http-equiv="refresh"' in (tmp_path / "cmp" / "report.html").read_text()
    compared(one, tmp_path / "cmp")
    assert 'http-equiv="refresh"' not in (tmp_path / "cmp" / "report.html").read_text()


# Elsewhere, from records alone


def records_only(source: Path, target: Path) -> None:
    for path in (*source.rglob("done.json"), source / FILE, source / "costs.json"):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def test_a_study_goes_on_elsewhere_from_its_records_with_its_data_moved(single, tmp_path):
    other = tmp_path / "other machine"
    other.mkdir()
    records_only(single / "cmp", other / "cmp")
    assert not list(other.rglob("*.safetensors"))
    compared(plan(other, seeds=(0,)), other / "cmp")
    assert timeless(other / "cmp") == timeless(single / "cmp").replace(str(single), str(other))
    grown = compared(plan(other, seeds=(0, 1)), other / "cmp")
    here = compared(plan(single, seeds=(0, 1)), shutil.copytree(single / "cmp", tmp_path / "cmp"))
    assert grown.verdict == here.verdict
    assert grown.contrasts == here.contrasts


def test_other_data_are_refused(single, tmp_path):
    records_only(single / "cmp", tmp_path / "cmp")
    text = text_in(tmp_path)
    text.write_text(text.read_text() + "Eve had nothing.\n" * 40)
    with pytest.raises(UsageError, match=r"planned with data\."):
        compared(plan(tmp_path, seeds=(0,)), tmp_path / "cmp")


def with_records(folder: Path, single: Path, by: dict[str, float], seeds: range) -> None:
    """Records of runs that a cluster might have made: a loss for every arm, with a little luck."""
    template = json.loads((single / "cmp" / "softmax" / "seed-0" / "done.json").read_text())
    for arm, shift in by.items():
        for seed in seeds:
            rows = [
                {**row, "value": 3 + shift + 0.01 * (seed % 3)} if row["metric"] == "nll" else row
                for row in template["rows"]
            ]
            place = folder / arm / f"seed-{seed}"
            place.mkdir(parents=True, exist_ok=True)
            (place / "done.json").write_text(json.dumps({**template, "seed": seed, "rows": rows}))


@pytest.fixture
def grown(single, tmp_path):
    """A study with records for twelve seeds, of which the plan knows one."""
    records_only(single / "cmp", tmp_path / "cmp")
    with_records(tmp_path / "cmp", single, {"softmax": 0.0, "ssmax": 0.1}, range(12))
    text_in(tmp_path)
    return tmp_path


def test_the_first_look_that_could_confirm_is_the_verdict_and_added_seeds_change_no_word(grown, single):
    """C10: seeds added one by one had an error of 12.8 %."""
    folder = grown / "cmp"
    compared(plan(grown, seeds=tuple(range(5))), folder)
    assert "looks" not in read_plan(folder)[1]
    with_records(folder, single, {"softmax": 0.1}, range(5, 7))  # ssmax is equal to it there
    first = compared(plan(grown, seeds=tuple(range(7))), folder)
    assert first.contrast(Key("", "ssmax", "nll")).state == "does not survive"
    assert read_plan(folder)[1]["looks"] == [{"seeds": list(range(7)), "missing": []}]
    more = compared(plan(grown, seeds=tuple(range(12))), folder)
    found = more.contrast(Key("", "ssmax", "nll"))
    assert (found.state, found.pairs, len(more.looks[0].seeds)) == ("does not survive", 12, 7)
    assert found.high - found.low < first.contrasts[0].high - first.contrasts[0].low
    assert more.verdict.more[0].startswith("Seeds 7-11 came after this verdict")
    same = compared(plan(grown, seeds=tuple(range(12))), folder)
    assert same == more


def test_a_report_of_the_records_is_a_look_too(grown):
    """Whoever reads the results before compare itself has told them has seen them."""
    folder, one = grown / "cmp", plan(grown, seeds=tuple(range(7)))
    keep(folder, {**read_plan(folder)[1], "plan": one.as_dict()})
    assert cli.main(["report", str(folder)]) == 0
    assert read_plan(folder)[1]["looks"] == [{"seeds": list(range(7)), "missing": []}]
    assert cli.main(["report", str(folder), "--primary", "ece"]) == 0


def test_declared_looks_are_each_judged_at_a_share_of_the_error_rate(single, tmp_path):
    folder, looks = tmp_path / "cmp", (7, 10)
    compared(plan(tmp_path, seeds=(0,), looks=looks), folder)
    with_records(folder, single, {"softmax": 0.1, "ssmax": 0.1}, range(12))
    with_records(folder, single, {"ssmax": 0.0}, range(1, 12))
    for count, said in (
        (6, None),
        (7, "not confirmed"),
        (9, "not confirmed"),
        (10, "better"),
        (12, "better"),
    ):
        results = compared(plan(tmp_path, seeds=tuple(range(count)), looks=looks), folder)
        found = results.contrast(Key("", "ssmax", "nll"))
        if said is None:
            assert (results.judged, found.state) == ([], "not judged")
            assert results.verdict.answer.startswith("No answer yet: the first of the declared looks")
        else:
            assert len(results.looks) == sum(look <= count for look in looks)
            assert found.state.replace("does not survive", "not confirmed") == said
    with pytest.raises(UsageError, match="planned with looks"):
        compared(plan(tmp_path, seeds=tuple(range(12)), looks=(7, 11)), folder)


def test_a_run_that_was_missing_at_the_look_stays_missing_in_its_verdict(grown):
    folder = grown / "cmp"
    gone = folder / "ssmax" / "seed-3" / "done.json"
    record = gone.read_text()
    gone.unlink()
    (gone.parent / "config.yaml").mkdir()  # so that the run fails
    first = compared(plan(grown, seeds=tuple(range(8))), folder)
    assert first.contrast(Key("", "ssmax", "nll")).pairs == 7
    assert read_plan(folder)[1]["looks"] == [{"seeds": list(range(8)), "missing": [["", "ssmax", 3]]}]
    gone.write_text(record)
    after = compared(plan(grown, seeds=tuple(range(8))), folder)
    found = after.contrast(Key("", "ssmax", "nll"))
    assert (found.pairs, found.p) == (8, first.contrast(Key("", "ssmax", "nll")).p)


@pytest.mark.parametrize("name", ["ssmax/seed-0/done.json", "costs.json"])
@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_record_is_read_or_refused_in_one_line(name, seed, single, tmp_path, monkeypatch):
    from test_plan import damaged

    records_only(single / "cmp", tmp_path / "cmp")
    path, rng = tmp_path / "cmp" / name, random.Random(seed)
    path.write_text(json.dumps(damaged(json.loads(path.read_text()), rng)))
    with contextlib.suppress(UsageError):
        plan_, facts = read_plan(tmp_path / "cmp")
        compare.collect(plan_, tmp_path / "cmp", facts)


RECORD = {"seed": 0, "status": "done", "rows": [], "curve": [], "examples": []}
ODD = (
    {"status": "odd"},
    {"rows": [1]},
    {"rows": [{"metric": "nll"}]},
    {"rows": [{"metric": "nll", "value": "low"}]},
    {"curve": [{"step": 1}]},
    {"curve": [[1, 2, 3]]},
    {"examples": ["x"]},
    {"more": 1},
)


@pytest.mark.parametrize("text", ["{}", "[1]", '{"a', *(json.dumps({**RECORD, **odd}) for odd in ODD)])
def test_a_record_of_something_else_is_refused_in_one_line(text, single, tmp_path):
    records_only(single / "cmp", tmp_path / "cmp")
    (tmp_path / "cmp" / "ssmax" / "seed-0" / "done.json").write_text(text)
    with pytest.raises(UsageError, match=r"done\.json"):
        compared(plan(tmp_path, seeds=(0,)), tmp_path / "cmp")


def test_a_run_is_measured_without_what_trained_it(tmp_path, monkeypatch):
    """Measuring may need the memory."""
    trainers, whole, ready = [], work.measured, work.prepared

    def seen(*place, **how):
        trainer, progress = ready(*place, **how)
        trainers.append(weakref.ref(trainer))
        return trainer, progress

    def measured(*place, **how):
        gc.collect()
        assert [trainer() for trainer in trainers] == [None]
        return whole(*place, **how)

    monkeypatch.setattr(work, "prepared", seen)
    monkeypatch.setattr(work, "measured", measured)
    one = plan(tmp_path, seeds=(0,))
    assert jobs.execute(next(compare._runs(one, tmp_path / "cmp"))).status == "done"
