"""The player as its readers meet it, in headless Chromium: desk, phone, dark, paper, keyboard."""

from __future__ import annotations

import re

import pytest
from example_traces import decode, trace

from langevin.sampling.watch import player

DESK, PHONE = 1280, 420
TRACES = [trace(24, 90, reopened=0.02), trace(8, 60, given=0), trace(120, 40)]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    file = tmp_path_factory.mktemp("player") / "texts.html"
    facts = {"run": "runs/x", "sampler": "confidence", "a-long-name-without-a-break": "x" * 90}
    file.write_text(player(TRACES, decode, "Text out of noise", facts), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def opened(open_page, address):
    """The player, when it is ready; unless asked otherwise for a reader who wants less motion."""

    def opened(width=DESK, reduced_motion="reduce", **options):
        page = open_page(address, width, reduced_motion=reduced_motion, **options)
        if options.get("java_script_enabled", True):
            told(page).not_to_be_empty()
        return page

    return opened


def told(page):
    """What the counter is expected to say, soon."""
    from playwright.sync_api import expect

    return expect(page.locator("#count"))


def at(page) -> int:
    return int(re.match(r"step (\d+) of ", page.inner_text("#count"))[1])


SHOWN = """() => [...document.querySelectorAll("#text i")].map((mark) => mark.className === "open" ? null
    : (mark.previousSibling.data + mark.textContent).replaceAll("↵\\n", "\\n"))"""


@pytest.mark.parametrize("which", range(len(TRACES)))
def test_every_step_is_shown_as_it_was_forwards_and_backwards(opened, which):
    page = opened()
    page.select_option("#which", str(which))
    steps = TRACES[which][:16]
    expected = [
        [None if put is None else word for word, put in zip(decode(s.tokens), s.committed, strict=True)]
        for s in steps
    ]
    page.locator("#at").evaluate("(e) => { e.value = 0; e.dispatchEvent(new Event('input')); }")
    for number, words in enumerate(expected):
        assert at(page) == number
        assert page.evaluate(SHOWN) == words
        assert f"· {words.count(None)} open" in page.inner_text("#count")
        page.click("#forward")
    page.click("#back")
    while (number := at(page)) > 0:
        page.click("#back")
        assert at(page) == number - 1
        if number <= len(expected):
            assert page.evaluate(SHOWN) == expected[number - 1]
    assert page.complaints == []


def test_it_plays_by_itself_to_the_end_and_again_on_request(opened):
    page = opened(reduced_motion="no-preference")
    button = page.locator("#play")
    assert button.get_attribute("aria-label") == "Pause"
    assert page.get_attribute("#count", "aria-live") == "off"
    for _ in range(8):
        page.keyboard.press("+")
    told(page).to_have_text("step 24 of 24 · 0 open")
    assert button.get_attribute("aria-label") == "Play"
    assert page.get_attribute("#count", "aria-live") == "polite"
    for _ in range(8):
        page.keyboard.press("-")
    button.click()
    assert at(page) <= 1
    assert button.get_attribute("aria-label") == "Pause"
    told(page).to_have_text(re.compile("step 1 "))
    button.click()
    stopped = at(page)
    page.wait_for_timeout(1200)
    assert at(page) == stopped


def test_readers_who_want_less_motion_get_the_end_and_nothing_moves(opened):
    page = opened()
    assert page.inner_text("#count") == "step 24 of 24 · 0 open"
    moving = """() => [...document.querySelectorAll("*")].map((e) => getComputedStyle(e)).some(
        (style) => parseFloat(style.transitionDuration) > 0 || style.animationName !== "none")"""
    assert not page.evaluate(moving)
    page.wait_for_timeout(300)
    assert at(page) == 24
    page.keyboard.press(" ")
    told(page).not_to_have_text(re.compile("step 24 "))
    assert opened(reduced_motion="no-preference").evaluate(moving)


def test_keys_do_what_the_line_below_says(opened):
    page = opened()
    assert page.locator(".help kbd").all_inner_texts() == [
        *("space", "←", "→", "home", "end", "c", "+", "−")
    ]
    for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 24)):
        page.keyboard.press(key)
        assert at(page) == step
    page.keyboard.press("ArrowRight")
    assert at(page) == 24
    seen = []
    for _ in range(3):
        page.keyboard.press("c")
        seen.append(page.get_attribute("body", "data-colour"))
    assert seen == ["step", "nothing", "confidence"]
    for key, told in (
        ("+", "8 steps"),
        ("-", "4 steps"),
        ("-", "2 steps"),
        ("-", "1 step"),
        ("-", "1 step"),
    ):
        page.keyboard.press(key)
        assert page.inner_text("#speed") == f"{told} a second"
    page.keyboard.press(" ")
    assert page.get_attribute("#play", "aria-label") == "Pause"
    page.keyboard.press(" ")
    assert page.get_attribute("#play", "aria-label") == "Play"


def test_space_on_a_button_presses_that_button_and_keys_work_on_the_slider(opened):
    page = opened()
    page.focus("#back")
    page.keyboard.press(" ")
    assert at(page) == 23
    assert page.get_attribute("#play", "aria-label") == "Play"
    page.focus("#at")
    page.keyboard.press("ArrowLeft")
    assert at(page) == 22
    page.focus("#which")
    page.keyboard.press("ArrowDown")
    assert "of 8" in page.inner_text("#count")


def test_all_is_reached_by_tab_with_a_visible_focus_and_has_a_name(opened):
    page = opened()
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => { const e = document.activeElement; return e === document.body ? null :
                [e.id || e.dataset.by, (e.ariaLabel || e.labels?.[0]?.textContent || e.textContent).trim(),
                 getComputedStyle(e).outlineStyle]; }"""
        )
        if found is None:
            break
        reached.append(found)
    names = ["back", "play", "forward", "at", "which", "slower", "faster", "confidence", "step", "nothing"]
    assert [one[0] for one in reached] == names
    assert all(name for _, name, _ in reached)
    assert {outline for _, _, outline in reached} == {"solid"}


def test_colours_tell_confidence_or_step_and_the_legend_says_which(opened):
    page = opened()
    colours = """() => [...document.querySelectorAll("#text i:not(.given)")].map(
        (mark) => [mark.title, getComputedStyle(mark).backgroundColor])"""
    by_confidence = page.evaluate(colours)
    assert page.inner_text(".ramp").split("\n") == ["0 %", "100 % sure"]
    page.click("[data-by=step]")
    by_step = page.evaluate(colours)
    assert page.inner_text(".ramp").split("\n") == ["first step", "last"]
    for found, pattern in ((by_confidence, r"(\d+) % sure"), (by_step, r"step (\d+)")):
        kinds = {}
        for title, colour in found:
            kinds.setdefault(re.search(pattern, title)[1], set()).add(colour)
        assert all(len(kind) == 1 for kind in kinds.values())  # equal ones look the same
        assert len(set.union(*kinds.values())) == len(kinds)  # and others do not
    page.click("[data-by=nothing]")
    assert {colour for _, colour in page.evaluate(colours)} == {"rgba(0, 0, 0, 0)"}
    assert not page.is_visible(".ramp")


CONTRAST = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const light = (colour) => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
            .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    return Math.min(...[...document.querySelectorAll("#text i:not(.given)")].map((mark) => {
        const { color, backgroundColor } = getComputedStyle(mark);
        const [low, high] = [light(color), light(backgroundColor)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_it_fits_reads_well_and_asks_for_nothing(opened, address, width, scheme):
    page = opened(width, color_scheme=scheme)
    for name in ("confidence", "step"):
        page.click(f"[data-by={name}]")
        assert page.evaluate(CONTRAST) >= 4.5
    for key in ("End", "ArrowLeft", "Home"):
        page.keyboard.press(key)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith("data:")] == [address]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 26)"}[scheme]


def test_the_words_of_a_text_stay_where_they_are_while_others_come(opened):
    page = opened()
    page.select_option("#which", "2")
    places = """() => [...document.querySelectorAll("#text i")].map((mark) => {
        const { left, width, top, bottom } = mark.getBoundingClientRect();
        return [left, width, (top + bottom) / 2].map(Math.round);
    })"""
    page.keyboard.press("End")
    ended = page.evaluate(places)
    page.keyboard.press("Home")
    assert page.evaluate(places) == ended


def test_what_is_open_is_neither_read_aloud_nor_copied(opened):
    page = opened()
    page.keyboard.press("Home")
    found = page.evaluate(
        """() => [...document.querySelectorAll("#text i.open")].map((mark) =>
            [mark.ariaHidden, getComputedStyle(mark).userSelect, mark.title])"""
    )
    assert len(found) == 86
    assert all(one == ["true", "none", ""] for one in found)


@pytest.mark.parametrize("options", [{"media": "print"}, {"java_script_enabled": False}])
def test_paper_and_readers_without_javascript_get_all_final_texts(opened, options):
    media = options.pop("media", None)
    page = opened(PHONE, color_scheme="dark", **options)
    if media:
        page.keyboard.press("Home")
        page.emulate_media(media=media, color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.pdf().startswith(b"%PDF")
    assert not page.is_visible("#text")
    finals = ["".join(decode(one[-1].tokens)) for one in TRACES]
    assert page.locator(".final p").all_text_contents() == finals
    assert all(one.is_visible() for one in page.locator(".final p").all())
