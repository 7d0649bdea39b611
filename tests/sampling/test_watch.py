"""Text out of noise, in a terminal and as the data of the player."""

from __future__ import annotations

import base64
import io
import json
import re
import zlib

import pytest
from example_traces import MASK, WORDS, decode, trace
from rich.cells import cell_len
from rich.console import Console

from langevin.data import tokenizers
from langevin.sampling import watch
from langevin.sampling.text import Step
from langevin.sampling.watch import BLOCK, END, Live, pieces, player, up_to

TEXT = "".join(WORDS[i % MASK] for i in range(40))
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def console(terminal: bool = True, width: int = 60) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        height=50,
        legacy_windows=False,
        _environ={},
    )


def frames(found: list[Step], on: Console) -> list[str]:
    """What the terminal was told for each step and at the end."""
    told = []
    with Live(decode, on) as live:
        for step in found:
            live.show(step)
            told.append(on.file.getvalue())
            on.file.seek(on.file.truncate(0))
    return [*told, on.file.getvalue()]


@pytest.fixture
def slow(monkeypatch):
    """Every step comes after the last frame was due to go."""
    monkeypatch.setattr(watch, "FRAME_SECONDS", 0)


def test_open_positions_are_blocks_and_the_line_above_counts_them(slow):
    told = frames(trace(), console())
    for number, (step, frame) in enumerate(zip(trace(), told[:-1], strict=True)):
        still = step.committed.count(None)
        assert frame.count(BLOCK.strip()) == still
        assert f"  step {number} · {still} open" in CODES.sub("", frame)


def test_only_what_came_since_the_last_frame_is_highlighted(slow):
    steps = [
        Step([0, MASK, MASK], [1.0, 0.1, 0.1], [0, None, None]),
        Step([0, 6, MASK], [1.0, 0.9, 0.1], [0, 1, None]),
        Step([0, 6, 7], [1.0, 0.9, 0.8], [0, 1, 2]),
    ]
    marked = [re.findall(r"\x1b\[30;46m(.*?)\x1b\[0m", told) for told in frames(steps, console())]
    assert marked == [[], ["cat"], ["saw"], []]


@pytest.mark.parametrize("width", [20, 60, 200])
def test_no_line_is_wider_than_the_terminal_with_wide_characters_too(slow, width):
    for frame in frames(trace(length=120, reopened=0.1), console(width=width)):
        assert max(cell_len(CODES.sub("", line)) for line in frame.splitlines()) <= width


def test_what_looks_like_markup_is_shown_as_it_is(slow):
    last = frames(trace(), console(width=200))[-1]
    assert "[b][/b][red]<script>alert(1)</script>&amp;" in CODES.sub("", last)


def test_what_would_move_the_cursor_is_not_sent_to_it():
    on = console()
    with Live(lambda ids: ["\x1b[2J\rhi\x07"], on) as live:
        live.show(Step([0], [1.0], [1]))
    assert "\ufffd[2J\ufffdhi\ufffd" in on.file.getvalue()


def test_a_text_that_was_cut_at_a_stop_string_ends_with_it():
    step = trace()[-1]
    cut = up_to(step, decode, TEXT[:30])
    assert "".join(decode(cut.tokens)).startswith(TEXT[:30])
    assert len(cut.tokens) == len(cut.confidence) == len(cut.committed) < len(step.tokens)
    assert not "".join(decode(cut.tokens[:-1])).startswith(TEXT[:30])
    assert up_to(step, decode, TEXT) == step
    ended = Step([0, 27, 6, 1], [1.0] * 4, [1] * 4)  # an end that the text goes on behind
    assert up_to(ended, decode, "".join(decode([0, 6]))).tokens == [0, 27, 6]


def test_a_thousand_steps_a_second_are_twenty_frames(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    on, drawn = console(), []
    monkeypatch.setattr(Live, "_progress", lambda self, step: drawn.append(step) or "")
    with Live(decode, on) as live:
        for step in trace(steps=1000, length=30):
            live.show(step)
            now[0] += 0.001
    assert 20 <= len(drawn) <= 22
    assert drawn[-1].committed.count(None) == 0


def unpacked(page: str):
    packed = re.search(r'atob\("([A-Za-z0-9+/=]+)"\)', page)
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


@pytest.mark.parametrize("reopened", [0.0, 0.1])
def test_the_changes_give_every_step_back(reopened):
    found = [trace(seed=1, reopened=reopened), trace(steps=3, length=9, reopened=reopened)]
    words, samples = unpacked(player(found, decode, "title", {}))
    assert len(samples) == 2
    for one, sample in zip(found, samples, strict=True):
        now = [(-1, 0, 0)] * sample["length"]
        for number, (step, changed) in enumerate(zip(one, sample["steps"], strict=True)):
            for at, word, percent in zip(*[iter(changed)] * 3, strict=True):
                now[at] = (word, percent, number)
            texts = [None if word < 0 else words[word] for word, _, _ in now]
            opened = [one is None for one in step.committed]
            assert texts == [None if o else w for o, w in zip(opened, decode(step.tokens), strict=True)]
            told = [(percent, put) for word, percent, put in now if word >= 0]
            assert told == [
                (round(100 * c), put)
                for c, put in zip(step.confidence, step.committed, strict=True)
                if put is not None
            ]


def test_what_stood_after_the_end_of_a_text_is_left_out():
    steps = [
        Step([0, MASK, MASK, MASK], [1.0, 0.0, 0.0, 0.0], [0, None, None, None]),
        Step([0, MASK, 6, 7], [1.0, 0.5, 0.9, 0.9], [0, None, 1, 1]),
        Step([0], [1.0], [0]),  # ended early, and then again not
        Step([0, 27, 6], [1.0, 0.8, 0.9], [0, 3, 1]),
    ]
    words, (sample,) = unpacked(player([steps], decode, "title", {}))
    assert sample["length"] == 3
    told = [
        (at, words[word] if word >= 0 else None)
        for changed in sample["steps"]
        for at, word, _ in zip(*[iter(changed)] * 3, strict=True)
    ]
    assert told == [(0, "Once"), (2, " cat"), (2, None), (1, "∎"), (2, " cat")]


def test_sixteen_texts_of_256_tokens_in_256_steps_are_less_than_a_megabyte():
    many = [trace(256, 256, seed=seed, reopened=0.1) for seed in range(16)]
    page = player(many, lambda ids: [f" {at * MASK + token}" for at, token in enumerate(ids)], "title", {})
    assert len(page) < 1_000_000


def test_a_page_holds_words_as_text_and_asks_for_nothing():
    page = player([trace()], decode, "<i>title</i>", {"run": "<b>x</b>"})
    assert "&lt;i&gt;title&lt;/i&gt;" in page
    assert "run &lt;b&gt;x&lt;/b&gt;" in page
    assert page.count("<script") == page.count("</script>") == 1
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|url\(|src=", page)


@pytest.mark.parametrize("name", ["bytes", "chars", "bpe-300"])
def test_the_pieces_of_a_text_are_the_text(name):
    text = "Zwölf Boxkämpfer: 月が, and a [b]é[/b].\n"
    tokenizer = tokenizers.make(name, [text * 3], [])
    ids = tokenizer(text, add_special_tokens=False).input_ids
    end = tokenizer.eos_token_id
    found = pieces(tokenizer)([end, *ids, end, 10_000])
    assert found[0] == ""
    assert found[-2:] == [END, ""]
    assert "".join(found[1:-2]) == text
    assert max(map(len, found)) < 20


def test_a_character_whose_tokens_are_not_all_there_is_broken_not_joined_across_the_gap():
    tokenizer = tokenizers.make("bytes", [], [])
    first, second, third = tokenizer("月").input_ids
    decode = pieces(tokenizer)
    assert decode([first, second, third]) == ["月", "", ""]
    assert decode([first, 10_000, third]) == ["\ufffd", "", "\ufffd"]
