"""The world a story happens in: people, things, places and where everything is."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Person(NamedTuple):
    name: str
    kind: str
    they: str
    them: str
    their: str


class Noun(NamedTuple):
    word: str
    plural: bool = False


class Thing(NamedTuple):
    noun: Noun
    colour: str
    food: bool

    @property
    def a(self) -> str:
        """As first mentioned: "a red ball", "an orange kite", "some green grapes"."""
        article = "some" if self.noun.plural else "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.noun.word}"

    @property
    def the(self) -> str:
        return f"the {self.noun.word}"

    @property
    def the_coloured(self) -> str:
        return f"the {self.colour} {self.noun.word}"

    @property
    def it(self) -> str:
        """As an object: "picked it up", "picked them up"."""
        return "them" if self.noun.plural else "it"

    @property
    def it_is(self) -> str:
        return "they are" if self.noun.plural else "it is"

    @property
    def was(self) -> str:
        return "were" if self.noun.plural else "was"


class Place(NamedTuple):
    preposition: str
    word: str

    @property
    def at(self) -> str:
        return f"{self.preposition} the {self.word}"


class Spot(NamedTuple):
    """Where a thing is: held or eaten by a person, lying at a place, or lost."""

    how: Literal["held", "eaten", "lying", "lost"]
    by: int = -1
    """The index of the person or of the place."""


@dataclass(frozen=True, eq=False)
class World:
    """Everything that later sentences depend on. People, things and places are named by index."""

    shape: str
    people: tuple[Person, ...]
    things: tuple[Thing, ...]
    spots: tuple[Spot, ...]
    """Of each thing."""
    places: tuple[Place, ...]
    """Those visited, in order."""
    here: int = 0
    topic: int | None = None
    """The subject of the last sentence: only this person can be "he" or "she" in the next."""
    wish: tuple[int, int] | None = None
    """The person who was last refused something, and the thing."""
    rained: bool = False
    events: int = 0

    def held(self, by: int | None = None) -> list[int]:
        """The things in somebody's hands, or in this person's."""
        return [i for i, spot in enumerate(self.spots) if spot.how == "held" and by in (None, spot.by)]

    def lying(self, place: int) -> list[int]:
        return [i for i, spot in enumerate(self.spots) if spot == Spot("lying", place)]

    def put(self, thing: int, spot: Spot) -> tuple[Spot, ...]:
        return (*self.spots[:thing], spot, *self.spots[thing + 1 :])

    def others(self, person: int) -> list[int]:
        return [i for i in range(len(self.people)) if i != person]


GIRLS = ("Mia", "Anna", "Lily", "Rose", "Ella", "Nora", "Ivy", "Clara", "Ruth", "Zoe", "Emma", "Jane")
BOYS = ("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Finn", "Hugo", "Paul", "Oscar", "Noah", "Adam")
PEOPLE = (
    *(Person(name, "girl", "she", "her", "her") for name in GIRLS),
    *(Person(name, "boy", "he", "him", "his") for name in BOYS),
)

COLOURS = ("red", "blue", "green", "yellow", "orange", "white", "black", "golden")


def _nouns(singular: str, plural: str) -> tuple[Noun, ...]:
    return tuple(Noun(word) for word in singular.split()) + tuple(
        Noun(word, True) for word in plural.split()
    )


TOYS = _nouns("ball kite drum book hat lantern whistle boat", "marbles boots gloves shells cards ribbons")
FOOD = _nouns("cake pie pear bun apple", "grapes plums nuts cherries berries")

PLACES = tuple(
    Place(preposition, word)
    for preposition, words in (
        ("in", ("garden", "forest", "barn", "park", "meadow")),
        ("on", ("hill", "beach", "bridge")),
        ("at", ("pond", "mill")),
        ("by", ("river", "well")),
    )
    for word in words
)
