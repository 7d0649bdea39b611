"""The page that runs an exported classifier, in headless Chromium, from a file and without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from langevin.data.tokenizers import encoder, make
from langevin.export.runtime import OnnxClassifier

PAGE = Path(__file__).parents[2] / "demo" / "dist" / "classify.html"
TEXTS = [
    "It's a fine, warm film!  They'd see_it\ttwice\n\n in 1999 \u00bd ...",
    "Naïve CAFÉ e\u0301té İstanbul Σίσυφος क्ष 你好，世界 😀👨\u200d👩\u200d👧 x²",
    "",
    "<|endoftext|> dull",
]

pytestmark = pytest.mark.skipif(
    not PAGE.is_file(), reason="the page is not built: cd demo && npm install && npm run build"
)


@pytest.fixture
def page(open_page: Any) -> Any:
    return open_page(PAGE.as_uri(), 420)


@pytest.mark.parametrize("name", ["bytes", "chars", "words", "spaces", "bpe-400"])
def test_texts_become_the_same_tokens(page: Any, name: str) -> None:
    tokenizer = make(name, TEXTS * 3, TEXTS)
    tokenizer.backend_tokenizer.encode_special_tokens = True
    ours = [ids.tolist() for ids, _ in encoder(tokenizer)(TEXTS, False)]
    given = [tokenizer.backend_tokenizer.to_str(), TEXTS]
    script = "([json, texts]) => texts.map(demo.tokenizerOf(JSON.parse(json)))"
    assert page.evaluate(script, given) == ours


def test_a_tokenizer_from_elsewhere_is_refused(page: Any) -> None:
    told = page.evaluate(
        "() => { try { demo.tokenizerOf({model: {type: 'Unigram'}}) } catch (e) { return e.message } }"
    )
    assert "not made by langevin" in told


@pytest.mark.parametrize("name", ["model.onnx", "model-int8.onnx"])
def test_the_page_says_what_the_file_says(page: Any, exported: Any, name: str) -> None:
    folder, _ = exported
    page.set_input_files("#files", [folder / name, folder / "tokenizer.json", folder / "labels.json"])
    page.get_by_text("ready", exact=True).wait_for()
    classify = OnnxClassifier(folder / name)
    for text in ("a warm film", "cold", "blue " * 100):
        theirs = page.evaluate("text => demo.classify(text)", text)["probabilities"]
        ours = dict(zip(classify.names, classify([text])[0].tolist(), strict=True))
        assert theirs == pytest.approx(ours, abs=1e-3 if "int8" in name else 1e-5)
    page.fill("#text", "a warm film")
    page.locator(".class").nth(2).wait_for()
    assert page.locator(".class .name").first.inner_text() == "good"
    assert not page.complaints
    assert all(request.startswith(("file:", "blob:", "data:")) for request in page.requests)


def test_a_missing_file_is_told(page: Any, exported: Any) -> None:
    page.set_input_files("#files", [exported[0] / "model.onnx"])
    page.get_by_text("choose three files").wait_for()
