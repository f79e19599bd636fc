"""Which accesses to shared rows are ordered, and by what: vector clocks over the journal.

Happens-before is Lamport's (1978): order within an actor, and from a cause to its effect. Clocks and the state kept per
row follow FastTrack (Flanagan and Freund, 2009): of writes the last one, of reads the last one by each component.

Actors are host threads, streams, and executions. Their order comes from:

    enqueue               -> the operation begins on the stream
    release of generation -> acquire of that very generation; one given up orders nothing
    dispatch              -> the execution begins, and so does the end of every program whose outputs it takes
    execution ends        -> a host thread has collected it
    stream goes idle      -> a host thread has seen it
    staging block free    -> the host has seen it free

A superseded acquire found its slot reserved for a later generation. Reserving asked, under the ring's lock, whether the
earlier one was recorded; so if it was, that release is ordered before the acquire too.

Executions come and go, so they share *components* of the clocks: a new one takes over the component of one that is
ordered before it. There are then as many components as executions that may overlap, however long the engine runs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from jaxserve.barrier.journal import ActorType, Kind, Outcome, StageStep

Clock = dict[int, int]  # component -> newest event of it that is ordered before now
Entry = tuple[int, int, int, int, int, int, int]  # the fields of journal.ENTRY

KEPT_GENERATIONS = 64  # of each ring; a ring has eight slots, so nobody asks for older ones
KEPT_LAUNCHES = 256


@dataclass(slots=True)
class Actor:
    """A host thread, a stream, or an execution.

    Attributes:
        number: as in the journal.
        component: its place in clocks; of a thread or a stream its number.
        clock: what is ordered before its next event.
        newest_step: number of the newest step dispatched when what it does now was asked for.
        waited: ring -> (generation, origin) of its newest acquire, the newest ring last.
    """

    number: int
    component: int
    clock: Clock
    newest_step: int = 0
    waited: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Launch:
    """An execution, from its dispatch on.

    Attributes:
        dispatched: the clock of the host thread that dispatched it.
        operands: launch ids of the programs whose outputs it takes.
        actor: itself, once something of it was seen.
        ended: whether somebody knows that it ended.
        given_up: nothing computed by it is delivered, so what it reads does not matter.
    """

    number: int
    step: int
    label: int
    dispatched: Clock
    operands: list[int]
    actor: Actor | None = None
    ended: bool = False
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """One access to a shared row or a staging block.

    Attributes:
        component, time: its epoch.
        actor: who; newest_step: see ``Actor``.
        launch: the execution it belongs to; None for threads and streams.
        is_write: whether it changes what is there.
        columns: ``first << 32 | count``; 0 for staging blocks.
        origin: index of its source line.
        waited: what its actor had waited for by then.
    """

    component: int
    time: int
    actor: int
    newest_step: int
    launch: Launch | None
    is_write: bool
    columns: int
    origin: int
    waited: dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Race:
    """Two accesses to one place that nothing orders; ``first`` came first this time."""

    subject: int  # buffer or staging area
    row: int  # row or block
    is_staging: bool
    first: Access
    second: Access


@dataclass(slots=True)
class _Place:
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)  # by component, since the write


class HappensBefore:
    """Replays journal entries in order; ``take`` returns the race an entry completes.

    What began before the first entry is not known: executions dispatched earlier are ignored.
    """

    def __init__(self) -> None:
        self._actors: dict[int, Actor] = {}
        self._launches: OrderedDict[int, Launch] = OrderedDict()
        self._components: list[Launch] = []  # the newest execution on each component
        self._released: dict[int, OrderedDict[int, Clock]] = {}  # ring -> generation -> clock of its record
        self._enqueued: dict[tuple[int, int], tuple[Clock, int]] = {}  # (stream, number) -> clock, newest step
        self._blocks: dict[tuple[int, int], Clock] = {}  # (staging area, block) -> clock when it was freed
        self._places: dict[tuple[int, int], _Place] = {}
        self._newest_step = 0
        self._rules = {
            Kind.ENQUEUE: self._enqueue, Kind.BEGIN_OPERATION: self._begin_operation, Kind.RELEASE: self._release,
            Kind.ACQUIRE: self._acquire, Kind.READ: self._read, Kind.WRITE: self._write, Kind.STAGE: self._stage,
            Kind.DISPATCH: self._dispatch, Kind.OPERAND: self._operand, Kind.COLLECT: self._collect,
            Kind.GIVE_UP: self._give_up, Kind.SYNC_STREAM: self._sync_stream,
            Kind.BEGIN_EXECUTION: self._execution, Kind.END_EXECUTION: self._execution,
        }  # fmt: skip

    def take(self, entry: Entry) -> Race | None:
        """Applies one entry."""
        rule = self._rules.get(entry[1])  # type: ignore[call-overload]
        return None if rule is None else rule(entry)

    @property
    def num_components(self) -> int:
        """Components that executions share."""
        return len(self._components)

    # -- actors --------------------------------------------------------------------------------------------------------

    def _actor(self, number: int) -> Actor | None:
        """Who acts; None for an execution that was not seen to be dispatched."""
        if number >> 56 == ActorType.EXECUTION:
            launch = self._launches.get(number & (1 << 56) - 1)
            return None if launch is None or launch.given_up else self._begun(launch)
        actor = self._actors.get(number)
        if actor is None:
            actor = self._actors[number] = Actor(number, number, {number: 1})
        return actor

    def _begun(self, launch: Launch) -> Actor:
        if launch.actor is not None:
            return launch.actor
        clock = dict(launch.dispatched)
        for number in launch.operands:
            operand = self._launches.get(number)
            if operand is not None:
                _join(clock, self._begun(operand).clock)
                operand.ended = True
        component = self._component(launch, clock)
        clock[component] = clock.get(component, 0) + 1
        launch.actor = Actor(ActorType.EXECUTION << 56 | launch.number, component, clock, launch.step)
        return launch.actor

    def _component(self, launch: Launch, clock: Clock) -> int:
        for index, last in enumerate(self._components):
            component = ActorType.EXECUTION << 56 | index
            assert last.actor is not None
            newest = last.actor.clock[component]
            if last.given_up or (last.ended and clock.get(component, 0) >= newest):
                clock[component] = newest
                self._components[index] = launch
                return component
        self._components.append(launch)
        return ActorType.EXECUTION << 56 | (len(self._components) - 1)

    @staticmethod
    def _published(actor: Actor) -> Clock:
        """The clock as others may take it over; what the actor does from now on is later than that."""
        clock = dict(actor.clock)
        actor.clock[actor.component] += 1
        return clock

    # -- what orders ---------------------------------------------------------------------------------------------------

    def _enqueue(self, entry: Entry) -> None:
        _, _, _, number, stream, operation, _ = entry
        actor = self._actor(number)
        if actor is not None:
            self._enqueued[stream, operation] = self._published(actor), self._newest_step

    def _begin_operation(self, entry: Entry) -> None:
        _, _, _, number, stream, operation, _ = entry
        actor = self._actor(number)
        enqueued = self._enqueued.pop((stream, operation), None)
        if actor is not None and enqueued is not None:
            clock, actor.newest_step = enqueued
            _join(actor.clock, clock)

    def _sync_stream(self, entry: Entry) -> None:
        _, _, _, number, stream, _, _ = entry
        actor, streams = self._actor(number), self._actor(ActorType.STREAM << 56 | stream)
        if actor is not None and streams is not None:  # idle: it has done nothing that was not finished
            _join(actor.clock, self._published(streams))

    def _release(self, entry: Entry) -> None:
        _, _, _, number, ring, generation, _ = entry
        actor = self._actor(number)
        if actor is None:
            return
        released = self._released.setdefault(ring, OrderedDict())
        released[generation] = self._published(actor)
        if len(released) > KEPT_GENERATIONS:
            released.popitem(last=False)

    def _acquire(self, entry: Entry) -> None:
        _, _, origin, number, ring, generation, outcome = entry
        actor = self._actor(number)
        if actor is None or outcome == Outcome.ABANDONED:
            return
        released = self._released.get(ring)
        clock = None if released is None else released.get(generation)
        if clock is not None:
            _join(actor.clock, clock)
        waited = {key: value for key, value in actor.waited.items() if key != ring}
        waited[ring] = generation, origin
        actor.waited = waited  # a new one: accesses keep the one of their time

    # -- launches ------------------------------------------------------------------------------------------------------

    def _dispatch(self, entry: Entry) -> None:
        _, _, label, number, launch, step, before = entry
        actor = self._actor(number)
        if actor is None:
            return
        self._newest_step = max(self._newest_step, step)
        operands = [before] if before else []
        self._launches[launch] = Launch(launch, step, label, self._published(actor), operands)
        if len(self._launches) > KEPT_LAUNCHES:
            self._launches.popitem(last=False)

    def _operand(self, entry: Entry) -> None:
        launch = self._launches.get(entry[4])
        if launch is not None and entry[5]:
            launch.operands.append(entry[5])

    def _execution(self, entry: Entry) -> None:
        self._actor(entry[3])

    def _collect(self, entry: Entry) -> None:
        _, _, _, number, launch_id, _, _ = entry
        actor, launch = self._actor(number), self._launches.get(launch_id)
        if actor is not None and launch is not None and not launch.given_up:
            _join(actor.clock, self._published(self._begun(launch)))
            launch.ended = True

    def _give_up(self, entry: Entry) -> None:
        """What a launch reads no longer matters, nor what programs read that ran for its sake alone."""
        lost, waiting = set(), [entry[4]]
        while waiting:
            launch = self._launches.get(waiting.pop())
            if launch is None or launch.given_up or (launch.ended and launch.number != entry[4]):
                continue
            launch.given_up = True
            lost.add(launch.number)
            waiting += launch.operands
        for place in self._places.values():
            place.reads = {c: a for c, a in place.reads.items() if a.launch is None or a.launch.number not in lost}
            if place.write is not None and place.write.launch is not None and place.write.launch.number in lost:
                place.write = None

    # -- accesses ------------------------------------------------------------------------------------------------------

    def _read(self, entry: Entry) -> Race | None:
        return self._access(entry, (entry[4], entry[5]), is_write=False, columns=entry[6], is_staging=False)

    def _write(self, entry: Entry) -> Race | None:
        return self._access(entry, (entry[4], entry[5]), is_write=True, columns=entry[6], is_staging=False)

    def _stage(self, entry: Entry) -> Race | None:
        _, _, _, number, area, block, step = entry
        key = (area, block)
        if step in (StageStep.FILL, StageStep.READ):
            return self._access(entry, key, is_write=step == StageStep.FILL, columns=0, is_staging=True)
        actor = self._actor(number)
        if actor is not None and step == StageStep.RELEASE:
            self._blocks[key] = self._published(actor)
        elif actor is not None and key in self._blocks:
            _join(actor.clock, self._blocks[key])
        return None

    def _access(
        self, entry: Entry, key: tuple[int, int], *, is_write: bool, columns: int, is_staging: bool
    ) -> Race | None:
        number, origin = entry[3], entry[2]
        actor = self._actor(number)
        if actor is None:
            return None
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place()
        clock, component = actor.clock, actor.component
        launch = self._launches.get(number & (1 << 56) - 1) if number >> 56 == ActorType.EXECUTION else None
        access = Access(component, clock[component], number, actor.newest_step, launch, is_write, columns, origin,
                        actor.waited)  # fmt: skip
        before = [] if place.write is None else [place.write]
        if is_write:
            before += place.reads.values()
        for other in before:
            if clock.get(other.component, 0) < other.time:
                return Race(*key, is_staging, other, access)
        if is_write:
            place.write = access
            place.reads = {}  # all ordered before this write, and so before whatever is ordered after it
        else:
            place.reads[component] = access
        return None


def _join(clock: Clock, other: Clock) -> None:
    for component, time in other.items():
        if clock.get(component, 0) < time:
            clock[component] = time
