"""The report as readers meet it, in headless Chromium: desk, phone, paper, and without JavaScript."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
from example_results import example, recipe, single

from langevin.studies.report import write_report
from langevin.studies.report.recipe_page import parts_page
from langevin.studies.report.speed_page import speed_page

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'"
)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine: apt-get install chromium"
)

DESK, PHONE, PAPER = 1280, 360, 688


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


def crowded() -> dict:
    """Names no column was made for, and a memory column besides."""
    results = example()
    long = "heat(t='head', distance='squared', alpha=1.0)+drift+noise(std=0.1)"
    old = results["arms"][1]["name"]
    results["arms"][1].update(name=long, spec=long)
    for c in results["comparisons"]:
        c["arm"] = long if c["arm"] == old else c["arm"]
    for arm in results["arms"]:
        for run in arm["runs"]:
            run["cost"]["peak_memory_bytes"] = 3_200_000_000
    extra = copy.deepcopy(results["arms"][2])
    extra["name"] = "x" * 70
    results["arms"].append(extra)
    results["verdict"].append("y" * 200)
    return results


KINDS = {
    "full": example,
    "recipe": recipe,
    "single": single,
    "two seeds": lambda: example(2, 2),
    "crowded": crowded,
}
OTHERS = {
    "speed": lambda: speed_page(kept("speed")),
    "parts": lambda: parts_page(kept("heat-calibration"), "layers"),
}


def kept(name: str) -> dict:
    return json.loads((Path(__file__).parents[2] / "docs" / "results" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    for kind, make in OTHERS.items():
        (folder / f"{kind}.html").write_text(make(), encoding="utf-8")
    return {
        **{kind: write_report(make(), folder / kind).as_uri() for kind, make in KINDS.items()},
        **{kind: (folder / f"{kind}.html").as_uri() for kind in OTHERS},
    }


@pytest.fixture
def opened(browser):
    """Open an address in a fresh context; whatever the page complains about or asks for is kept."""
    contexts = []

    def open_page(address, width, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.complaints, page.requests = [], []
        page.on("console", lambda said: page.complaints.append(said.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_the_page_fits_and_has_nothing_to_complain_about(opened, pages, kind, width, scheme):
    page = opened(pages[kind], width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith("data:")] == [pages[kind]]


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize(("kind", "least"), [("full", 200), ("crowded", 200), ("speed", 40), ("parts", 80)])
def test_the_text_of_every_chart_is_readable_and_inside_the_page(opened, pages, kind, least, width):
    page = opened(pages[kind], width)
    texts = page.evaluate(
        """() => [...document.querySelectorAll("svg.chart")].flatMap(svg => {
            const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
            return [...svg.querySelectorAll("text")].map(t => {
                const box = t.getBoundingClientRect();
                const size = parseFloat(getComputedStyle(t).fontSize) * scale;
                return {words: t.textContent, size, left: box.left, right: box.right};
            });
        })"""
    )
    assert len(texts) > least
    assert min(text["size"] for text in texts) >= 10
    assert [text for text in texts if text["left"] < 0 or text["right"] > width] == []


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("kind", ["full", "crowded", "two seeds", *OTHERS])
def test_no_ticks_labels_or_names_of_a_chart_run_into_each_other(opened, pages, kind, width):
    page = opened(pages[kind], width)
    clashes = page.evaluate(
        """() => [...document.querySelectorAll("svg.chart")].flatMap(svg => {
            const boxes = [...svg.querySelectorAll("text")].map(
                t => [t.textContent, t.getBoundingClientRect()]);
            return boxes.flatMap(([a, one], i) => boxes.slice(i + 1)
                .filter(([b, two]) => one.left < two.right && two.left < one.right
                    && one.top + 3 < two.bottom - 3 && two.top + 3 < one.bottom - 3)
                .map(([b]) => [svg.querySelector("title").textContent, a, b]));
        })"""
    )
    assert clashes == []


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize(("kind", "charts"), [("full", 16), ("speed", 4), ("parts", 8)])
def test_every_chart_shows_both_axis_labels(opened, pages, kind, charts, width):
    page = opened(pages[kind], width)
    found = page.evaluate(
        """() => [...document.querySelectorAll("svg.chart")].map(svg => ["x", "y"].map(side => {
            const label = svg.querySelector(".axis-label." + side);
            return label?.textContent.trim() && label.getBoundingClientRect().width > 10;
        }))"""
    )
    assert len(found) >= charts
    assert all(x and y for x, y in found)


SHOWN = """table => [...table.tBodies[0].rows].map(row => [
    row.cells[0].dataset.value, ...[...row.cells].slice(1).map(cell => cell.dataset.value ?? null)])"""


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_a_header_sorts_up_then_down_then_as_it_was(opened, pages, width):
    page = opened(pages["full"], width)
    table = page.locator("table[data-sortable]").first
    original = table.evaluate(SHOWN)
    for column, head in ((1, "test loss"), (2, "difference to softmax")):
        header = table.locator("th", has_text=head)
        button = header.locator("button")
        measured = [row for row in original if row[column] is not None]
        missing = [row for row in original if row[column] is None]
        ranked = sorted(measured, key=lambda row: float(row[column]))
        assert ranked[::-1] != measured
        for state, rows in (
            ("ascending", ranked + missing),
            ("descending", ranked[::-1] + missing),
            ("none", original),
        ):
            button.click()
            assert header.get_attribute("aria-sort") == state
            assert table.evaluate(SHOWN) == rows


def test_the_keyboard_sorts_and_only_one_column_is_marked(opened, pages):
    page = opened(pages["full"], DESK)
    table = page.locator("table[data-sortable]").first
    table.locator("th", has_text="verdict").locator("button").click()
    table.locator("th", has_text="arm").locator("button").first.press("Enter")
    names = [row[0] for row in table.evaluate(SHOWN)]
    assert names == sorted(names)
    assert table.locator("th[aria-sort=ascending]").count() == 1


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_without_javascript_only_sorting_is_missing(opened, pages, width):
    def sections(page):
        return page.locator("section h2").all_inner_texts(), page.locator("svg.chart").count()

    plain = opened(pages["full"], width, java_script_enabled=False)
    scripted = opened(pages["full"], width)
    assert sections(plain) == sections(scripted)
    assert all(section.is_visible() for section in plain.locator("section").all())
    assert plain.locator("thead button").count() == 0
    assert scripted.locator("thead button").count() > 10
    assert plain.locator("tbody tr").count() == scripted.locator("tbody tr").count()


def test_dark_is_dark_and_paper_is_white(opened, pages):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page = opened(pages["full"], DESK, color_scheme="dark")
    assert background(page) == "rgb(21, 23, 26)"
    page.emulate_media(media="print", color_scheme="dark")
    assert background(page) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("kind", ["full", "recipe", "crowded", *OTHERS])
def test_on_paper_nothing_is_wider_than_the_sheet(opened, pages, kind):
    page = opened(pages[kind], PAPER)
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
