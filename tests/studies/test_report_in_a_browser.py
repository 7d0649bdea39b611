"""The page as readers meet it, in headless Chromium: desk, phone, dark, paper, and without JavaScript."""

from __future__ import annotations

from dataclasses import replace

import pytest
from example_results import study

from langevin.studies.report import write_report

DESK, PHONE, PAPER = 1280, 420, 688
PARTS = ("4 layers", "8 layers", "12 layers")
LONG = "heat(t='head', distance='squared', alpha=1.0)+drift+noise(std=0.1)"
KINDS = {
    "one": {"claims": True, "grid": True, "diverged": True},
    "pair": {"arms": 2, "seeds": 7},
    "parts": {"arms": 8, "seeds": 9, "parts": PARTS},
    "swap": {"arms": 5, "swap": True, "renamed": {"ssmax": LONG, "sigmoid": "x" * 70}},
    "going": {"ended": 3},
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    return {kind: write_report(study(**of), folder / kind).as_uri() for kind, of in KINDS.items()}


@pytest.fixture
def opened(open_page):
    """A page with all its sections open, if asked for."""

    def opened(address, width, expanded=False, **options):
        page = open_page(address, width, **options)
        if expanded:
            page.click("button.all")
        return page

    return opened


def box(page, selector: str) -> dict[str, float]:
    return page.locator(selector).first.bounding_box()


FIRST = (
    ".first h1",
    ".answer",
    ".sure",
    ".first figure >> nth=0",
    ".first figure >> nth=1",
    ".first thead",
)


@pytest.mark.parametrize("kind", ["one", "pair", "parts", "swap"])
def test_the_first_screen_holds_the_answer_and_what_shows_it(opened, pages, kind):
    page = opened(pages[kind], DESK)
    for selector in FIRST:
        found = box(page, selector)
        assert found["y"] >= 0, selector
        assert found["y"] + found["height"] <= 800, selector
    widths = [box(page, selector)["width"] for selector in FIRST[3:5]]
    assert sum(widths) > 0.85 * DESK


def test_a_chart_that_is_alone_keeps_its_note_in_lines(opened, tmp_path):
    of_many = study(**KINDS["parts"])
    parts = [replace(p, arms=tuple(replace(arm, costs=()) for arm in p.arms)) for p in of_many.parts]
    page = opened(write_report(replace(of_many, parts=tuple(parts)), tmp_path).as_uri(), DESK)
    assert page.locator(".first figure").count() == 1
    assert box(page, ".first figure .note")["width"] > 300


def test_on_a_phone_the_same_comes_in_the_same_order(opened, pages):
    for kind in ("one", "parts"):
        page = opened(pages[kind], PHONE)
        tops = [box(page, selector)["y"] for selector in FIRST]
        assert tops == sorted(tops)
        ends = [box(page, s)["y"] + box(page, s)["height"] for s in FIRST]
        assert all(end <= top + 1 for end, top in zip(ends, tops[1:], strict=False))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("kind", KINDS)
def test_the_page_fits_and_has_nothing_to_complain_about(opened, pages, kind, width, scheme):
    page = opened(pages[kind], width, expanded=True, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith("data:")] == [pages[kind]]


CLASHES = """() => {
    const meet = (one, two) => one.left + 1 < two.right && two.left + 1 < one.right
        && one.top + 3 < two.bottom - 3 && two.top + 3 < one.bottom - 3;
    const among = (boxes) => boxes.flatMap(([a, one], i) =>
        boxes.slice(i + 1).filter(([b, two]) => meet(one, two)).map(([b]) => [a, b]));
    const texts = [...document.querySelectorAll("svg.drawing")].flatMap((svg) => among(
        [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()])));
    const shown = [...document.querySelectorAll("h1, .answer, .sure, .more, .note, figcaption, "
        + "svg.drawing, .legend li, .scroll, summary, button.all, h3, dl, pre, blockquote")];
    const blocks = among(shown.map((e) => [e.textContent.slice(0, 60), e.getBoundingClientRect()])
        .filter(([, one]) => one.width && one.height));
    return [...texts, ...blocks];
}"""


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_lies_over_anything_else(opened, pages, kind, width):
    page = opened(pages[kind], width, expanded=True)
    assert page.evaluate(CLASHES) == []


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("kind", ["one", "parts", "swap"])
def test_the_text_of_every_drawing_is_readable_and_inside_the_page(opened, pages, kind, width):
    page = opened(pages[kind], width, expanded=True)
    texts = page.evaluate(
        """() => [...document.querySelectorAll("svg.drawing")].flatMap((svg) => {
            const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
            return [...svg.querySelectorAll("text")].map((t) => {
                const box = t.getBoundingClientRect();
                return {words: t.textContent, size: parseFloat(getComputedStyle(t).fontSize) * scale,
                        left: box.left, right: box.right};
            });
        })"""
    )
    assert len(texts) > 60
    assert min(text["size"] for text in texts) >= 9
    assert [text for text in texts if text["left"] < 0 or text["right"] > width] == []


@pytest.mark.parametrize("kind", ["one", "going"])
def test_every_axis_is_labelled(opened, pages, kind):
    page = opened(pages[kind], DESK, expanded=True)
    found = page.evaluate(
        """() => [...document.querySelectorAll("svg.drawing")].map((svg) => ["x", "y"].map((side) =>
            [...svg.querySelectorAll(".axis-label." + side)].every((label) =>
                label.textContent.trim() && label.getBoundingClientRect().width > 10)
            && svg.querySelectorAll(".axis-label." + side).length))"""
    )
    forest, *others = found if kind == "one" else [[1, 0], *found]
    assert forest == [1, 0]  # its rows have names
    assert others
    assert all(x and y for x, y in others)


def test_sections_fold_by_keyboard_and_all_at_once(opened, pages):
    page = opened(pages["one"], DESK)
    count = page.locator("details").count()
    assert page.locator("details[open]").count() == 0
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details[open]").count() == 1
    page.keyboard.press("Space")
    assert page.locator("details[open]").count() == 0
    button = page.locator("button.all")
    assert button.inner_text() == "Expand all"
    button.press("Enter")
    assert page.locator("details[open]").count() == count
    assert button.inner_text() == "Fold all"


def test_what_was_open_is_open_when_the_page_reloads(opened, pages):
    page = opened(pages["going"], DESK)
    page.locator("summary", has_text="Commands").click()
    page.wait_for_function("sessionStorage.getItem('open')?.includes('commands')")
    page.reload()
    assert page.locator("details[open] h2").all_inner_texts() == ["Commands"]


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_nothing_moves_for_readers_who_want_less_motion(opened, pages, motion):
    page = opened(pages["one"], DESK, reduced_motion=motion)
    moving = page.evaluate(
        """() => [...document.querySelectorAll("*")].some((e) => [null, "::before"].some((part) => {
            const style = getComputedStyle(e, part);
            return parseFloat(style.transitionDuration) > 0 || style.animationName !== "none"
                || style.scrollBehavior === "smooth";
        }))"""
    )
    assert moving == (motion == "no-preference")


SHOWN = """table => [...table.tBodies[0].rows].map(
    row => [...row.cells].map(cell => cell.dataset.value ?? null))"""


def test_a_header_sorts_up_then_down_then_as_it_was(opened, pages):
    page = opened(pages["one"], DESK)
    table = page.locator("table[data-sortable]").first
    original = table.evaluate(SHOWN)
    header = table.locator("th", has_text="difference to softmax")
    known = sorted((row for row in original if row[2] is not None), key=lambda row: float(row[2]))
    missing = [row for row in original if row[2] is None]
    for state, rows in (
        ("ascending", known + missing),
        ("descending", known[::-1] + missing),
        ("none", original),
    ):
        header.locator("button").press("Enter")
        assert header.get_attribute("aria-sort") == state
        assert table.evaluate(SHOWN) == rows


def test_without_javascript_only_sorting_and_the_button_are_missing(opened, pages):
    plain = opened(pages["one"], DESK, java_script_enabled=False)
    assert plain.locator("button").count() == 0
    assert plain.locator("summary h2").count() > 10
    plain.locator("summary", has_text="Costs").click()
    assert plain.locator("#costs table").is_visible()


def test_dark_is_dark_and_paper_is_white(opened, pages):
    page = opened(pages["one"], DESK, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(21, 23, 26)"
    ink = "getComputedStyle(document.querySelector('.axis-label text')).fill"
    assert page.evaluate(ink) == "rgb(231, 232, 234)"
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(background) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("kind", ["one", "parts", "swap"])
def test_on_paper_all_is_open_and_nothing_is_wider_than_the_sheet(opened, pages, kind):
    page = opened(pages[kind], PAPER)
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    hidden = page.evaluate(
        """() => [...document.querySelectorAll("details > :not(summary)")]
            .filter((e) => e.getBoundingClientRect().height === 0).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert hidden == []
    assert page.evaluate(CLASHES) == []
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
