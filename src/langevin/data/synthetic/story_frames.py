"""How stories begin and end: four shapes, each with its own opening and its own last line."""

from langevin.data.synthetic.choices import Teller
from langevin.data.synthetic.story_world import (
    COLOURS,
    FOOD,
    PEOPLE,
    PLACES,
    TOYS,
    Person,
    Place,
    Spot,
    Thing,
    World,
)

MOST_THINGS = 3
MOST_PLACES = 3


def listed(names: list[str]) -> str:
    """ "Mia", "Mia and Tom", "Mia, Tom and Anna"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def new_thing(teller: Teller, known: tuple[Thing, ...]) -> Thing:
    """A thing that is not in the story yet. Whether it can be eaten matters later; the rest is wording."""
    food = teller.choose((False, True), (3, 2))
    used = {thing.noun for thing in known}
    noun = teller.vary([noun for noun in (FOOD if food else TOYS) if noun not in used])
    return Thing(noun, teller.vary(COLOURS), food)


def new_place(teller: Teller, known: tuple[Place, ...]) -> Place:
    return teller.vary([place for place in PLACES if place not in known])


def begin(teller: Teller) -> World:
    """The people, what they have at first, and where they are."""
    shape = teller.choose(("friends", "birthday", "market", "lost"))
    return OPENINGS[shape](teller)


def _introduce(teller: Teller, known: tuple[Person, ...], count: int) -> tuple[Person, ...]:
    """Name so many new people, "Mia, Tom and Anna"; returns all there are now."""
    people = known
    for index in range(count):
        person = teller.vary([person for person in PEOPLE if person not in people])
        teller.say("" if index == 0 else " and " if index == count - 1 else ", ", person.name)
        people += (person,)
    return people


def _helpers(teller: Teller) -> int:
    """How many people there are besides the first."""
    return teller.choose((1, 2), (3, 2))


def _friends(teller: Teller) -> World:
    trait = teller.vary(("kind", "clever", "brave", "cheerful", "quiet"))
    first = teller.vary(PEOPLE)
    teller.say("Once upon a time there was a ", trait, " ", first.kind, " named ", first.name, ". ")
    others = _helpers(teller)
    teller.say(first.they.capitalize(), " had ", "a friend" if others == 1 else "two friends", " named ")
    people = _introduce(teller, (first,), others)
    place = new_place(teller, ())
    teller.say(". One day they met ", place.at, ".")
    owner = teller.choose(range(len(people)))
    teller.say(" ", people[owner].name, " had ")
    thing = new_thing(teller, ())
    teller.say(thing.a, ".")
    return World("friends", people, (thing,), (Spot("held", owner),), (place,), topic=owner)


def _birthday(teller: Teller) -> World:
    first = teller.vary(PEOPLE)
    teller.say("It was ", first.name, "'s birthday, and ", first.they, " met ", first.their)
    others = _helpers(teller)
    teller.say(" friend " if others == 1 else " friends ")
    people = _introduce(teller, (first,), others)
    place = new_place(teller, ())
    teller.say(" ", place.at, ".")
    giver = teller.choose(range(1, len(people)))
    teller.say(" ", people[giver].name, " gave ", first.them, " ")
    thing = new_thing(teller, ())
    teller.say(thing.a, ".")
    return World("birthday", people, (thing,), (Spot("held", 0),), (place,), topic=giver)


def _market(teller: Teller) -> World:
    teller.say("One day ")
    people = _introduce(teller, (), 1 + _helpers(teller))
    teller.say(" went to the market.")
    things: tuple[Thing, ...] = ()
    for person in people[:2]:
        things += (new_thing(teller, things),)
        teller.say(" ", person.name, " bought ", things[-1].a, ".")
    for person in people[2:]:
        teller.say(" ", person.name, " bought nothing.")
    place = new_place(teller, ())
    teller.say(" On the way home they came to the ", place.word, ".")
    return World("market", people, things, (Spot("held", 0), Spot("held", 1)), (place,))


def _lost(teller: Teller) -> World:
    teller.say("One morning ")
    (first,) = _introduce(teller, (), 1)
    thing = new_thing(teller, ())
    teller.say(" had ", thing.a, ", but then ", first.they, " lost ", thing.it, ". ")
    people = _introduce(teller, (first,), _helpers(teller))
    place = new_place(teller, ())
    teller.say(" came to help ", first.them, ".")
    teller.say(" First they looked ", place.at, ", but they did not find ", thing.it, ".")
    return World("lost", people, (thing,), (Spot("lost"),), (place,))


OPENINGS = {"friends": _friends, "birthday": _birthday, "market": _market, "lost": _lost}


def finish(teller: Teller, world: World) -> None:
    """Home, and what has become of everything. Only the first and the last line leave a choice."""
    evening = (
        "In the evening they went home.",
        "When it got dark, they went home.",
        "At last they went home.",
    )
    teller.say(" ", teller.vary(evening))
    if world.rained:
        teller.say(" They were still wet from the rain.")
    for index, person in enumerate(world.people):
        had = [world.things[thing].the_coloured for thing in world.held(index)]
        teller.say(" ", person.name, " had ", listed(had) if had else "nothing", ".")
    for thing, spot in zip(world.things, world.spots, strict=True):
        the = thing.the_coloured.capitalize()
        if spot.how == "lying":
            teller.say(" ", the, " ", thing.was, " left ", world.places[spot.by].at, ".")
        elif spot.how == "lost":
            teller.say(" ", the, " ", thing.was, " never found.")
    if world.wish is not None:
        _wish(teller, world, *world.wish)
    teller.say(" ", teller.vary(_last_lines(world)))


def _wish(teller: Teller, world: World, wisher: int, wanted: int) -> None:
    person, thing, spot = world.people[wisher], world.things[wanted], world.spots[wanted]
    if spot.by == wisher and spot.how in ("held", "eaten"):
        teller.say(" ", person.name, " was glad, because ", person.they, " got ", thing.the, " after all.")
    else:
        teller.say(" ", person.name, " still wished for ", thing.the, ".")


def _last_lines(world: World) -> tuple[str, ...]:
    first, *others = world.people
    everyone = listed([person.name for person in world.people])
    if world.shape == "friends":
        return (f"{everyone} were good friends.", f"{everyone} would meet again soon.")
    if world.shape == "birthday":
        return (f"It was a happy birthday for {first.name}.", f"{first.name} had a good birthday.")
    if world.shape == "market":
        return ("It had been a good day at the market.", "The market was closed by then.")
    if world.spots[0].how == "lost":
        return (f"{first.name} would look again the next day.", f"{first.name} was a little sad.")
    helpers = listed([person.name for person in others])
    return (f"{first.name} thanked {helpers} for the help.", f"{helpers} had been a great help.")
