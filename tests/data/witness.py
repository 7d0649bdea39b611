"""A reader of stories who knows no grammar of them: follows the facts from the words, and checks the rest.

Sentences that report events change what the witness knows; answers and endings must agree with it.
"""

import re
from collections import Counter

A = r"(?:an?|some) \w+ (?P<thing>\w+)"
SENTENCES = {
    "birthday": r"It was (?P<child>\w+)'s birthday, and [^.]* (?P<place>\w+)\. (?P<who>\w+) gave \w+ "
    + A
    + r"\.",
    "lose": r"(?P<who>\w+) had " + A + ", but then",
    "get": r"(?P<who>\w+) (?:had|bought|found) " + A,
    "recover": r"There they found the (?P<thing>\w+), and (?P<who>\w+) took",
    "give": r"(?P<who>\w+) gave (?P<to>[A-Z]\w+) the (?P<thing>\w+)\.",
    "give to": r"(?P<who>\w+) gave the (?P<thing>\w+) to (?P<to>\w+)\.",
    "grant": r'(?P<who>\w+) asked (?P<owner>\w+), "May I have the (?P<thing>\w+)\?" "Yes,',
    "refuse": r'(?P<who>\w+) asked (?P<owner>\w+), "May I have the (?P<thing>\w+)\?" "No,',
    "trade": r"(?P<a>\w+) took the (?P<x>\w+), and (?P<b>\w+) took the (?P<y>\w+)\.",
    "leave": r"(?P<who>\w+) put the (?P<thing>\w+) down",
    "pick": r"(?P<who>\w+) saw the (?P<thing>\w+) and picked",
    "eat": r"(?P<who>\w+) was hungry, so \w+ ate the (?P<thing>\w+)\.",
    "answer": r'(?P<who>\w+) asked, "Where \w+ the (?P<thing>\w+)\?" "(?P<says>.*?)," said (?P<other>\w+)',
    "start": r"(?:they met \w+|First they looked \w+|they came to) the (?P<place>\w+)[.,]",
    "go": r"[Tt]hey (?:went|walked|ran) (?:back )?to the (?P<place>\w+)\.",
    "still there": r"The (?P<things>[\w ,]+) (?:was|were) still there",
    "hands": r"(?P<who>\w+) had (?P<all>nothing|the [\w ,]+)\.",
    "left": r"The \w+ (?P<thing>\w+) (?:was|were) left \w+ the (?P<place>\w+)\.",
    "wish": r"(?P<who>\w+) (?P<how>still wished for|was glad, because \w+ got) the (?P<thing>\w+)",
}
PATTERNS = {kind: re.compile(r"\b" + pattern) for kind, pattern in SENTENCES.items()}


def witness(text: str) -> Counter:
    """How many statements of each kind were checked; an AssertionError where the story is wrong."""
    held: dict[str, str] = {}
    eaten: dict[str, str] = {}
    lying: dict[str, str] = {}
    refused: tuple[str, str] | None = None
    here = last = ""
    checked: Counter = Counter()
    at = 0
    while at < len(text):
        kind, found = next(((k, m) for k, p in PATTERNS.items() if (m := p.match(text, at))), ("", None))
        if found is None:
            at = text.find(" ", at) + 1 or len(text)
            continue
        at = found.end()
        said = found.groupdict()
        who, thing = said.get("who"), said.get("thing")
        who = last if who in ("he", "she", "He", "She") else who
        last = who or ""
        if kind == "birthday":
            held[thing], here = said["child"], said["place"]
        elif kind in ("get", "recover", "pick"):
            lying.pop(thing, None)
            held[thing] = who
        elif kind in ("give", "give to"):
            assert held[thing] == who
            held[thing] = last = said["to"]
        elif kind == "grant":
            assert held[thing] == said["owner"]
            held[thing], last = who, said["owner"]
        elif kind == "refuse":
            assert held[thing] == said["owner"]
            refused = (who, thing)
        elif kind == "trade":
            assert (held[said["x"]], held[said["y"]]) == (said["b"], said["a"])
            held[said["x"]], held[said["y"]], last = said["a"], said["b"], ""
        elif kind == "leave":
            assert held.pop(thing) == who
            lying[thing] = here
        elif kind == "eat":
            assert held.pop(thing) == who
            eaten[thing] = who
        elif kind in ("start", "go"):
            here = said["place"]
        elif kind == "still there":
            things = re.findall(r"(\w+)(?:,| and|$)", said["things"])
            assert set(things) == {thing for thing, place in lying.items() if place == here}
        elif kind == "answer":
            last = said["other"]
            if thing in lying:
                place = "here" if lying[thing] == here else lying[thing]
                assert said["says"].split()[-1] == place
            else:
                person = held.get(thing) or eaten[thing]
                subject, verb, _ = said["says"].split()
                assert subject == ("I" if person == last else person)
                assert verb == ("ate" if thing in eaten else "have" if subject == "I" else "has")
        elif kind == "hands":
            things = re.findall(r"the \w+ (\w+)", said["all"])
            assert set(things) == {thing for thing, person in held.items() if person == who}
        elif kind == "left":
            assert lying[thing] == said["place"]
        elif kind == "wish":
            assert refused == (who, thing)
            assert (said["how"] != "still wished for") == (who in (held.get(thing), eaten.get(thing)))
        checked[kind] += 1
    return checked
