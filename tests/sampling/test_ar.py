"""`langevin generate` writes many texts at once, and each as if it were alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import langevin
from langevin import cli
from langevin.errors import UsageError
from langevin.models.heads import LangevinForCausalLM
from langevin.runs import train
from langevin.sampling.ar import drawn, generate, random_numbers
from langevin.sampling.text import Request, Sampling, Text
from training.small_run import small

PROMPTS = ["Ann had", "", "Cleo gave one away, so", "Bo"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generation")
    config = small(folder, mixer="ssmax", steps=40, lr=1e-2, dropout=0.0, context=64)
    return train(config, folder / "run", quiet=True)[0].path


@pytest.fixture(scope="module")
def loaded(run: Path) -> tuple[Any, Any]:
    opened = langevin.load(run)
    return opened.model.double(), opened.tokenizer


def texts(loaded: Any, requests: list[Request], batch: int = 16, **sampling: Any) -> list[Text]:
    return generate(*loaded, requests, Sampling(**{"tokens": 30, **sampling}), batch=batch)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5, "temperature": 1.3}, {"top_p": 0.8}])
def test_a_prompt_and_a_seed_give_the_same_text_in_any_batch(loaded: Any, sampling: dict[str, Any]) -> None:
    requests = [Request(prompt, seed) for prompt in PROMPTS for seed in (3, 4)]
    together = texts(loaded, requests, **sampling)
    in_threes = texts(loaded, requests, batch=3, **sampling)
    alone = [texts(loaded, [request], **sampling)[0] for request in requests]
    assert together == in_threes == alone
    assert len({t.text for t in together}) == len(requests)


@pytest.mark.parametrize("mixer", ["heat(t='head')", "sigmoid", "sima", "neighbor"])
@pytest.mark.parametrize("positions", ["learned", "rope", "none"])
def test_every_mixer_writes_padded_prompts_as_if_they_were_alone(
    loaded: Any, mixer: str, positions: str
) -> None:
    model, tokenizer = loaded
    config = type(model.config)(**{**model.config.to_dict(), "mixer": mixer, "positions": positions})
    torch.manual_seed(1)
    other = (
        LangevinForCausalLM(config).eval().double()
    )  # rounding, which a batch changes, shall decide nothing
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    requests = [Request(prompt) for prompt in PROMPTS]
    together = texts((other, tokenizer), requests)
    assert together == [texts((other, tokenizer), [request])[0] for request in requests]


def test_torch_s_own_random_stream_is_neither_read_nor_moved(loaded: Any) -> None:
    before = texts(loaded, [Request("Ann")])
    state = torch.get_rng_state()
    torch.manual_seed(99)
    assert texts(loaded, [Request("Ann")]) == before
    torch.set_rng_state(state)
    texts(loaded, [Request("Ann")])
    assert torch.equal(torch.get_rng_state(), state)


def test_tokens_are_drawn_with_the_probabilities_of_the_model() -> None:
    p = torch.tensor([0.5, 0.0, 0.3, 0.2])
    n = 4000
    tokens = drawn(p.log().expand(n, 4), random_numbers([7], n).T)
    counts = torch.bincount(tokens[:, 0], minlength=4) / n
    assert counts[1] == 0
    torch.testing.assert_close(counts, p, rtol=0, atol=4 * 0.5 / n**0.5)


def test_temperature_zero_is_what_greedy_decoding_gives(loaded: Any) -> None:
    model, tokenizer = loaded
    ids = tokenizer("Ann had", return_tensors="pt").input_ids
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    first, second = texts(loaded, [Request("Ann had", 0), Request("Ann had", 1)], temperature=0.0)
    assert first.text == second.text == tokenizer.decode(greedy[0], skip_special_tokens=True)
    (one,) = texts(loaded, [Request("Ann had", 5)], top_k=1)
    assert one.text == first.text


def test_a_stop_string_ends_its_text_and_no_other(loaded: Any) -> None:
    requests = [Request(prompt, seed) for prompt in ("Ann had", "Bo") for seed in range(4)]
    free = texts(loaded, requests, tokens=60)
    stopped = texts(loaded, requests, tokens=60, stop=("a",))
    for whole, cut in zip(free, stopped, strict=True):
        new = whole.text[len(whole.prompt) :]
        if "a" in new:
            assert cut.text == whole.prompt + new[: new.index("a") + 1]
            assert cut.ended == "stop"
        else:
            assert cut == whole
    assert {"stop"} < {t.ended for t in (*stopped, *texts(loaded, requests, tokens=2, stop=("a",)))}


def test_the_end_of_text_token_ends_a_text(loaded: Any) -> None:
    model, tokenizer = loaded
    letter = tokenizer(" ").input_ids[0]
    kept = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [kept, letter]
    try:
        found = texts(loaded, [Request("Ann", seed) for seed in range(6)], tokens=60)
    finally:
        model.generation_config.eos_token_id = kept
    ended = [t for t in found if t.ended == "end"]
    assert ended
    assert all(t.tokens < 60 and t.text[3:].count(" ") <= 1 for t in ended)


def test_texts_are_told_of_as_they_end(loaded: Any) -> None:
    told, steps = [], []
    requests = [Request("Ann had", seed) for seed in range(5)]
    made = generate(
        *loaded,
        requests,
        Sampling(tokens=40, stop=("a", "e")),
        batch=3,
        finished=lambda index, text: told.append((index, text)),
        stepped=lambda rows, tokens: steps.append((rows, tokens)),
    )
    assert sorted(told, key=lambda pair: pair[0]) == list(enumerate(made))
    in_batch = [text.tokens for index, text in told if index < 3]
    assert all(
        text.text == loaded[1].decode([*loaded[1](text.prompt).input_ids, *text.ids]) for _, text in told
    )
    assert in_batch == sorted(in_batch)
    assert steps[0] == (range(3), 1)
    assert steps[-1][0] == range(3, 5)


def test_the_command_prints_every_text_with_its_prompt_and_keeps_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(run), "--prompt", "Ann had", "Bo", "--samples", "2", "--tokens", "9"]
    assert cli.main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["prompt"], row["seed"]) for row in rows] == [
        ("Ann had", 0),
        ("Ann had", 1),
        ("Bo", 0),
        ("Bo", 1),
    ]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    for row in rows:
        assert f"--- {row['prompt']!r}, seed {row['seed']}\n{row['text']}\n" in shown
    assert cli.main(["generate", str(run), "--prompt", "Bo", "--seed", "1", "--tokens", "9"]) == 0
    assert capsys.readouterr().out == rows[3]["text"] + "\n"
    kept = [json.loads(line) for line in (run / "samples" / "samples.jsonl").read_text().splitlines()]
    assert kept[-1] == rows[3]
    assert len(kept) == 9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "-1"], "temperature=-1.0 must be 0 or more"),
        (["--top-p", "0"], "top_p=0.0 must be above 0"),
        (["--top-k", "-2"], "top_k=-2"),
        (["--tokens", "0"], "tokens=0 must be 1 or more"),
        (["--batch", "0"], "batch=0 must be positive"),
        (["--stop", ""], "an empty string stops nothing"),
    ],
)
def test_a_wrong_option_is_refused(
    run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_more_tokens_than_learned_positions_are_refused_before_anything_is_written(loaded: Any) -> None:
    model, tokenizer = loaded
    config = type(model.config)(**{**model.config.to_dict(), "positions": "learned"})
    other = LangevinForCausalLM(config).eval()
    with pytest.raises(UsageError, match="do not fit 64 positions"):
        texts((other, tokenizer), [Request("Ann"), Request("Ann " * 10)], tokens=30)
