"""What can happen in a story: each event says when it is possible, tells itself and changes the world."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from langevin.data.synthetic.choices import Teller
from langevin.data.synthetic.story_frames import MOST_PLACES, MOST_THINGS, listed, new_place, new_thing
from langevin.data.synthetic.story_world import Spot, World


@dataclass(frozen=True)
class Event:
    weight: float
    possible: Callable[[World], list[tuple[Any, ...]]]
    """The ways it can happen now, as arguments of `tell`."""
    tell: Callable[..., World]


def _lead(teller: Teller, subject: str) -> None:
    """Start a sentence with its subject, after an optional word or two."""
    lead = teller.vary((" ", " Then ", " Soon ", " After that, "))
    teller.say(lead, subject.capitalize() if lead == " " and subject in ("he", "she", "they") else subject)


def _subject(teller: Teller, world: World, person: int) -> None:
    """Start a sentence about a person: by name, or as he or she when the last one was about them too."""
    name, pronoun = world.people[person].name, world.people[person].they
    _lead(teller, teller.vary((name, pronoun), (1, 2)) if world.topic == person else name)


def _after(world: World, **changes: Any) -> World:
    return replace(world, events=world.events + 1, **changes)


def _moves(world: World) -> list[tuple[Any, ...]]:
    new = [(None,)] if len(world.places) < MOST_PLACES else []
    return new + [(place,) for place in _elsewhere(world) if not world.lying(place)]


def _returns(world: World) -> list[tuple[Any, ...]]:
    """Where something was left, they are likelier to go again."""
    return [(place,) for place in _elsewhere(world) if world.lying(place)]


def _elsewhere(world: World) -> list[int]:
    return [place for place in range(len(world.places)) if place != world.here]


def _go(teller: Teller, world: World, place: int | None) -> World:
    """They go somewhere, perhaps because of the rain; what lies there is still there."""
    rain = False if world.rained else teller.choose((False, True), (3, 1))
    if rain:
        teller.say(" It began to rain, so they ran ")
    else:
        _lead(teller, "they")
        teller.say(teller.vary((" went ", " walked ", " ran ")))
    world = replace(world, rained=world.rained or rain, topic=None)
    if place is None:
        found = new_place(teller, world.places)
        teller.say("to the ", found.word, ".")
        world = replace(world, places=(*world.places, found), here=len(world.places))
        return _after(_search(teller, world) if Spot("lost") in world.spots else world)
    teller.say("back to the ", world.places[place].word, ".")
    if left := [world.things[thing] for thing in world.lying(place)]:
        was = "were" if len(left) > 1 else left[0].was
        teller.say(" ", listed([thing.the for thing in left]).capitalize(), " ", was, " still there.")
    return _after(world, here=place)


def _search(teller: Teller, world: World) -> World:
    """At a place where they have not been, the lost thing turns up or does not."""
    thing, owner = world.things[0], world.people[0]
    if teller.choose((True, False)):
        teller.say(" There they found ", thing.the, ", and ", owner.name, " took ", thing.it, ".")
        return replace(world, spots=world.put(0, Spot("held", 0)), topic=0)
    teller.say(" They looked for ", thing.the, ", but ", "they were" if thing.noun.plural else "it was")
    teller.say(" not there.")
    return world


def _finds(world: World) -> list[tuple[Any, ...]]:
    return [(person,) for person in range(len(world.people))] if len(world.things) < MOST_THINGS else []


def _find(teller: Teller, world: World, person: int) -> World:
    _subject(teller, world, person)
    thing = new_thing(teller, world.things)
    teller.say(
        " found ", thing.a, " ", teller.vary(("under a bush", "behind a stone", "in the grass")), "."
    )
    spots = (*world.spots, Spot("held", person))
    return _after(world, things=(*world.things, thing), spots=spots, topic=person)


def _gifts(world: World) -> list[tuple[Any, ...]]:
    return [(thing, to) for thing in world.held() for to in world.others(world.spots[thing].by)]


def _give(teller: Teller, world: World, thing: int, to: int) -> World:
    giver, taker, what = world.spots[thing].by, world.people[to], world.things[thing]
    _subject(teller, world, giver)
    teller.say(" gave ", teller.vary((f"{taker.name} {what.the}", f"{what.the} to {taker.name}")), ".")
    them, he = world.people[giver].them, taker.they.capitalize()
    teller.say(" ", teller.vary((f"{he} thanked {them}.", f"{he} was happy.", f"{he} smiled at {them}.")))
    return _after(world, spots=world.put(thing, Spot("held", to)), topic=to)


def _requests(world: World) -> list[tuple[Any, ...]]:
    return [(asker, thing) for thing, asker in _gifts(world)]


def _ask(teller: Teller, world: World, asker: int, thing: int) -> World:
    """A request is granted, or refused; a refusal is remembered as a wish."""
    holder, what = world.spots[thing].by, world.things[thing]
    owner = world.people[holder]
    _subject(teller, world, asker)
    teller.say(" asked ", owner.name, ', "May I have ', what.the, '?"')
    if teller.choose((True, False)):
        teller.say(' "Yes," said ', owner.name, ", and ", owner.they, " gave ", what.it, " to ")
        teller.say(world.people[asker].them, ".")
        return _after(world, spots=world.put(thing, Spot("held", asker)), topic=holder)
    teller.say(' "No," said ', owner.name, ", and ", owner.they, " kept ", what.it, ". ")
    teller.say(world.people[asker].name, " was ", teller.vary(("sad", "cross")), ".")
    return _after(world, wish=(asker, thing), topic=asker)


def _trades(world: World) -> list[tuple[Any, ...]]:
    held = world.held()
    return [(a, b) for a in held for b in held if world.spots[a].by < world.spots[b].by]


def _trade(teller: Teller, world: World, first: int, second: int) -> World:
    left, right = world.spots[first].by, world.spots[second].by
    names = [world.people[left].name, world.people[right].name]
    _lead(teller, listed(names))
    teller.say(" traded. ", names[0], " took ", world.things[second].the)
    teller.say(", and ", names[1], " took ", world.things[first].the, ".")
    spots = list(world.spots)
    spots[first], spots[second] = spots[second], spots[first]
    return _after(world, spots=tuple(spots), topic=None)


def _leave(teller: Teller, world: World, thing: int) -> World:
    person = world.spots[thing].by
    _subject(teller, world, person)
    teller.say(" put ", world.things[thing].the, " down and forgot ", world.things[thing].it, ".")
    return _after(world, spots=world.put(thing, Spot("lying", world.here)), topic=person)


def _pickups(world: World) -> list[tuple[Any, ...]]:
    return [(thing, person) for thing in world.lying(world.here) for person in range(len(world.people))]


def _pick_up(teller: Teller, world: World, thing: int, person: int) -> World:
    _subject(teller, world, person)
    teller.say(" saw ", world.things[thing].the, " and picked ", world.things[thing].it, " up.")
    return _after(world, spots=world.put(thing, Spot("held", person)), topic=person)


def _eat(teller: Teller, world: World, thing: int) -> World:
    """Hunger makes somebody eat what they hold."""
    person = world.spots[thing].by
    _subject(teller, world, person)
    teller.say(" was hungry, so ", world.people[person].they, " ate ", world.things[thing].the, ".")
    return _after(world, spots=world.put(thing, Spot("eaten", person)), topic=person)


def _questions(world: World) -> list[tuple[Any, ...]]:
    """Nobody asks for what they have, had for lunch, or what all of them are looking for."""
    return [
        (asker, thing, other)
        for thing, spot in enumerate(world.spots)
        for asker in range(len(world.people))
        if spot.how == "lying" or (spot.how != "lost" and spot.by != asker)
        for other in world.others(asker)
    ]


def _where(teller: Teller, world: World, asker: int, thing: int, other: int) -> World:
    """Somebody asks where a thing is, and the answer is right."""
    what, spot = world.things[thing], world.spots[thing]
    _subject(teller, world, asker)
    teller.say(' asked, "Where ', "are " if what.noun.plural else "is ", what.the, '?" "')
    me = spot.by == other
    if spot.how == "lying":
        where = "here" if spot.by == world.here else world.places[spot.by].at
        teller.say(what.it_is.capitalize(), " ", where)
    elif spot.how == "held":
        teller.say("I have " if me else f"{world.people[spot.by].name} has ", what.it)
    else:
        teller.say("I" if me else world.people[spot.by].name, " ate ", what.it)
    teller.say('," said ', world.people[other].name, ".")
    return _after(world, topic=other)


EVENTS = (
    Event(3, _moves, _go),
    Event(6, _returns, _go),
    Event(2, _finds, _find),
    Event(3, _gifts, _give),
    Event(3, _requests, _ask),
    Event(2, _trades, _trade),
    Event(2, lambda world: [(thing,) for thing in world.held()], _leave),
    Event(3, _pickups, _pick_up),
    Event(2, lambda world: [(thing,) for thing in world.held() if world.things[thing].food], _eat),
    Event(3, _questions, _where),
)
