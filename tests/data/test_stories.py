"""The story grammar: its exact entropy, one derivation a text, and facts that stay straight."""

import math
import random
import re
import statistics
from collections import Counter

import pytest
from derivations import derivations, expected_nats, outline
from witness import witness

from langevin.data.synthetic import stories as grammar
from langevin.data.synthetic.choices import sample
from langevin.data.synthetic.story_world import FOOD, PEOPLE, TOYS


@pytest.fixture(scope="module")
def told():
    return list(grammar.stories(3000, seed=7, split="test"))


def test_the_mean_surprise_of_many_stories_is_the_exact_entropy(told):
    nats = [one.nats for one in told]
    error = statistics.stdev(nats) / math.sqrt(len(nats))
    assert abs(statistics.mean(nats) - grammar.NATS_PER_STORY) < 3 * error
    assert error < 0.01 * grammar.NATS_PER_STORY


def unfinished(world):
    """Nothing matters where only the ending is left."""
    return None if grammar.ENDS[world.events] == 1 else outline(world)


def test_the_entropy_that_is_written_down_is_that_of_the_grammar():
    assert expected_nats(grammar.begin, grammar.step, unfinished) == grammar.NATS_PER_STORY


def test_a_text_has_one_derivation_and_it_is_the_one_that_wrote_it(told):
    """So the text determines the choices, and the entropy of the text is that of the choices."""
    for one in told[:60]:
        assert derivations(grammar.begin, grammar.step, one.text) == [one.choices]


def test_the_exact_entropy_does_not_depend_on_names_or_on_merging_like_worlds(monkeypatch):
    """On stories of one or two events: with other words standing for all, and with no two worlds merged."""
    monkeypatch.setattr(grammar, "ENDS", (0.0, 0.5, 1.0))
    merged = expected_nats(grammar.begin, grammar.step, unfinished)
    last = expected_nats(grammar.begin, grammar.step, unfinished, lambda count: count - 1)
    apart = expected_nats(grammar.begin, grammar.step, lambda world: object())
    assert last == pytest.approx(merged, rel=1e-12)
    assert apart == pytest.approx(merged, rel=1e-12)


def test_the_exact_entropy_of_a_program_that_can_be_done_by_hand():
    """A fair coin, then a die if heads, then wording of 1 : 3."""

    def start(teller):
        return "die" if teller.choose((True, False)) else "end"

    def step(teller, state):
        if state == "die":
            teller.choose(range(6))
        teller.vary("ab", (1, 3))
        return None

    wording = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    exact = math.log(2) + 0.5 * math.log(6) + wording
    assert expected_nats(start, step, lambda state: state) == pytest.approx(exact, rel=1e-12)
    drawn = [sample(start, step, random.Random(i)).nats for i in range(4000)]
    assert statistics.mean(drawn) == pytest.approx(exact, abs=4 * statistics.stdev(drawn) / math.sqrt(4000))


def test_an_ambiguous_program_shows_as_several_derivations():
    def start(teller):
        teller.say(teller.choose(("a", "ab")))
        return 0

    def step(teller, state):
        teller.say(teller.choose(("bc", "c")))

    assert len(derivations(start, step, "abc")) == 2
    assert len(derivations(start, step, "ac")) == 1
    assert derivations(start, step, "b") == []


def test_a_seed_gives_the_same_stories_and_another_seed_or_split_others():
    first = list(grammar.stories(5, 0, "train"))
    assert first == list(grammar.stories(9, 0, "train"))[:5]
    assert first != list(grammar.stories(5, 1, "train"))
    assert first != list(grammar.stories(5, 0, "valid"))


def test_the_stories_are_the_same_in_every_release():
    """Results on stories are only comparable while these are the stories."""
    assert grammar.fingerprint() == "57f30222aa18b3cea8bad75a5d52199351f9c44bd727609913213a5ff07a8c7e"


GIRL = {person.name: person.kind == "girl" for person in PEOPLE}
PLURAL = {noun.word: noun.plural for noun in (*TOYS, *FOOD)}


def test_verbs_articles_and_pronouns_agree(told):
    seen = 0
    for one in told:
        for noun, verb in re.findall(r"[Tt]he (?:\w+ )?(\w+) (was|were) (?:left|never|still)", one.text):
            assert (verb == "were") == PLURAL[noun] or f"and the {noun} were still" in one.text
            seen += 1
        for article, colour, noun in re.findall(r"\b(an?|some) (\w+) (\w+)[.,]? ", one.text):
            if noun in PLURAL:
                assert article == ("some" if PLURAL[noun] else "an" if colour == "orange" else "a")
                seen += 1
        for noun, it in re.findall(r"the (\w+) (?:down and forgot|and picked) (it|them)", one.text):
            assert (it == "them") == PLURAL[noun]
            seen += 1
        for name, she in re.findall(r"said (\w+), and (he|she) ", one.text):
            assert (she == "she") == GIRL[name]
            seen += 1
    assert seen > 10_000


def test_what_a_story_says_of_hands_places_and_wishes_is_what_happened(told):
    checked = Counter()
    for one in told:
        checked += witness(one.text)
    assert min(checked[kind] for kind in ("answer", "hands", "left", "wish")) > 300
    assert checked["still there"] > 30
