"""Every rule of the race check, by logs written by hand: with the rule's edge no race, without it one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxserve.barrier import journal
from jaxserve.barrier.happens_before import HappensBefore, Race
from jaxserve.barrier.journal import ActorType, Kind, OperationType, Outcome, StageStep
from jaxserve.barrier.native import native_module
from jaxserve.barrier.race_check import RaceCheck, report
from jaxserve.core.errors import JaxserveError, RaceError

native = native_module("cpu")
HOST, OTHER_HOST = ActorType.HOST << 56 | 1, ActorType.HOST << 56 | 2
STREAM_ID, AREA, WRITE_DONE, READ_DONE, STEP_DONE, TABLE = 10, 11, 12, 13, 14, 15
STREAM = ActorType.STREAM << 56 | STREAM_ID
NAMES = {STREAM_ID: "schedule stream", AREA: "staging", WRITE_DONE: "write_done", READ_DONE: "target.read_done",
         STEP_DONE: "target.step_done", TABLE: "block_tables"}  # fmt: skip
STRINGS = ["", "scheduler.py:5 _plan", "target, decode[batch=4]", "handlers.cc:7 snapshot"]
ROW = 3


def execution(launch: int) -> int:
    return ActorType.EXECUTION << 56 | launch


class Log:
    """A journal written by hand. ``race`` is the first one found."""

    def __init__(self) -> None:
        self.order = HappensBefore()
        self.race: Race | None = None
        self.num_operations = 0

    def add(self, kind: Kind, actor: int, subject: int, a: int = 0, b: int = 0, origin: int = 0) -> Log:
        self.race = self.race or self.order.take((0, kind, origin, actor, subject, a, b))
        return self

    def write(self, row: int = ROW, host: int = HOST) -> Log:
        """A row write from enqueue to end."""
        self.operation(OperationType.COPY, host)
        self.add(Kind.WRITE, STREAM, TABLE, row, 3, 1)
        return self.add(Kind.END_OPERATION, STREAM, STREAM_ID, self.num_operations, OperationType.COPY)

    def operation(self, kind: OperationType, host: int = HOST) -> Log:
        self.num_operations += 1
        self.add(Kind.ENQUEUE, host, STREAM_ID, self.num_operations, kind)
        return self.add(Kind.BEGIN_OPERATION, STREAM, STREAM_ID, self.num_operations, kind)

    def stream_waits(self, ring: int, generation: int, outcome: Outcome = Outcome.RECORDED, host: int = HOST) -> Log:
        self.operation(OperationType.WAIT, host)
        return self.add(Kind.ACQUIRE, STREAM, ring, generation, outcome)

    def publish(self, generation: int) -> Log:
        self.operation(OperationType.RECORD)
        return self.add(Kind.RELEASE, STREAM, WRITE_DONE, generation)

    def dispatch(self, launch: int, before: int = 0, host: int = HOST) -> Log:
        return self.add(Kind.DISPATCH, host, launch, launch, before, 2)

    def read(self, launch: int, row: int = ROW) -> Log:
        return self.add(Kind.READ, execution(launch), TABLE, row, 3, 3)

    def acquire(self, actor: int, ring: int, generation: int, outcome: Outcome = Outcome.RECORDED) -> Log:
        return self.add(Kind.ACQUIRE, actor, ring, generation, outcome)

    def release(self, actor: int, ring: int, generation: int) -> Log:
        return self.add(Kind.RELEASE, actor, ring, generation)

    def step(self, launch: int, before: int = 0) -> Log:
        """A step as the engine runs it, up to the marker: publish, dispatch, wait, read, record."""
        self.publish(launch).dispatch(launch, before)
        self.acquire(execution(launch), WRITE_DONE, launch)
        return self.read(launch).release(execution(launch), READ_DONE, launch)


# -- write after read --------------------------------------------------------------------------------------------------


def test_a_write_behind_the_marker_is_ordered():
    assert Log().write().step(1).stream_waits(READ_DONE, 1).write().race is None


def test_a_write_without_a_wait_races_with_the_read():
    race = Log().write().step(1).write().race
    assert race is not None and (race.subject, race.row) == (TABLE, ROW)
    assert (race.first.is_write, race.second.is_write) == (False, True)


def test_the_read_may_come_second_and_it_is_the_same_race():
    log = Log().write().publish(1).dispatch(1).write()
    race = log.acquire(execution(1), WRITE_DONE, 1).read(1).race
    assert race is not None and race.first.is_write and not race.second.is_write


def test_a_wait_for_the_generation_before_is_not_enough():
    log = Log().write().step(1).stream_waits(READ_DONE, 1).write().step(2, before=1)
    assert log.race is None
    assert log.stream_waits(READ_DONE, 1).write().race is not None


def test_another_ring_orders_nothing():
    assert Log().write().step(1).release(HOST, STEP_DONE, 1).stream_waits(STEP_DONE, 1).write().race is not None


def test_other_rows_do_not_conflict():
    assert Log().write().step(1).write(row=ROW + 1).race is None


def test_what_is_read_behind_the_record_is_not_covered_by_it():
    log = Log().write().step(1).read(1).stream_waits(READ_DONE, 1)
    assert log.write().race is not None
    log = Log().write().step(1).read(1).release(execution(1), STEP_DONE, 1).stream_waits(STEP_DONE, 1)
    assert log.write().race is None


def test_an_abandoned_generation_orders_nothing():
    log = Log().write().step(1).stream_waits(READ_DONE, 1, Outcome.ABANDONED)
    assert log.write().race is not None


def test_a_superseded_generation_that_was_recorded_orders():
    assert Log().write().step(1).stream_waits(READ_DONE, 1, Outcome.SUPERSEDED).write().race is None


def test_a_superseded_generation_that_was_never_recorded_orders_nothing():
    log = Log().write().publish(1).dispatch(1).acquire(execution(1), WRITE_DONE, 1).read(1)
    assert log.stream_waits(READ_DONE, 1, Outcome.SUPERSEDED).write().race is not None


# -- read after write --------------------------------------------------------------------------------------------------


def test_a_read_that_did_not_wait_for_the_write_races():
    race = Log().write().publish(1).dispatch(1).read(1).race
    assert race is not None and race.first.is_write


def test_a_host_that_waited_passes_it_on_by_its_dispatch():
    assert Log().write().publish(1).acquire(HOST, WRITE_DONE, 1).dispatch(1).read(1).race is None


def test_a_host_that_waited_after_the_dispatch_does_not():
    assert Log().write().publish(1).dispatch(1).acquire(HOST, WRITE_DONE, 1).read(1).race is not None


def test_a_host_that_saw_the_stream_idle_passes_it_on():
    log = Log().write().add(Kind.SYNC_STREAM, HOST, STREAM_ID, 1)
    assert log.dispatch(1).read(1).race is None


def test_seeing_the_stream_idle_says_nothing_of_later_writes():
    log = Log().write().add(Kind.SYNC_STREAM, HOST, STREAM_ID, 1).write()
    assert log.dispatch(1).read(1).race is not None


def test_a_stream_that_gathers_what_an_execution_writes_must_wait_for_its_end():
    """Accepted tokens read behind the marker, which comes before they are written."""
    log = Log().publish(1).dispatch(1).release(execution(1), READ_DONE, 1)
    log.add(Kind.WRITE, execution(1), TABLE, ROW, 1).release(execution(1), STEP_DONE, 1)
    log.stream_waits(READ_DONE, 1)
    early = log.operation(OperationType.COPY).add(Kind.READ, STREAM, TABLE, ROW, 1).race
    assert early is not None and early.first.is_write

    log = Log().publish(1).dispatch(1)
    log.add(Kind.WRITE, execution(1), TABLE, ROW, 1).release(execution(1), STEP_DONE, 1)
    log.stream_waits(STEP_DONE, 1).operation(OperationType.COPY)
    assert log.add(Kind.READ, STREAM, TABLE, ROW, 1).race is None


# -- the host ----------------------------------------------------------------------------------------------------------


def test_what_a_host_enqueues_after_collecting_comes_after_the_execution():
    log = Log().write().step(1)
    assert log.add(Kind.COLLECT, HOST, 1).write().race is None


def test_a_write_enqueued_before_collecting_does_not():
    log = Log().write().step(1)
    log.add(Kind.ENQUEUE, HOST, STREAM_ID, 99, OperationType.COPY).add(Kind.COLLECT, HOST, 1)
    log.add(Kind.BEGIN_OPERATION, STREAM, STREAM_ID, 99, OperationType.COPY)
    assert log.add(Kind.WRITE, STREAM, TABLE, ROW, 3).race is not None


def test_another_thread_that_collects_passes_it_on_by_a_record_only():
    """The watcher of programs without a marker."""
    log = Log().write().step(1).add(Kind.COLLECT, OTHER_HOST, 1).release(OTHER_HOST, STEP_DONE, 1)
    assert log.stream_waits(STEP_DONE, 1).write().race is None
    assert Log().write().step(1).add(Kind.COLLECT, OTHER_HOST, 1).write().race is not None


# -- executions --------------------------------------------------------------------------------------------------------


def test_an_execution_comes_after_those_whose_outputs_it_takes():
    """The second one's marker covers what the first one read, which has none of its own."""
    log = Log().write().publish(1).dispatch(1).acquire(execution(1), WRITE_DONE, 1).read(1)
    log.dispatch(2, before=1).release(execution(2), READ_DONE, 2).stream_waits(READ_DONE, 2)
    assert log.write().race is None


def test_an_execution_that_takes_no_outputs_is_not_ordered_behind_the_one_before():
    log = Log().write().publish(1).dispatch(1).acquire(execution(1), WRITE_DONE, 1).read(1)
    log.dispatch(2).release(execution(2), READ_DONE, 2).stream_waits(READ_DONE, 2)
    assert log.write().race is not None


def test_a_step_comes_after_its_prep_program_too():
    log = Log().write().publish(1).dispatch(1).acquire(execution(1), WRITE_DONE, 1).read(1)
    log.dispatch(2).add(Kind.OPERAND, HOST, 2, 1)
    log.release(execution(2), STEP_DONE, 2).stream_waits(STEP_DONE, 2)
    assert log.write().race is None


def test_collecting_a_step_that_never_ran_covers_its_prep_program():
    log = Log().write().publish(1).dispatch(1).acquire(execution(1), WRITE_DONE, 1).read(1)
    log.dispatch(2).add(Kind.OPERAND, HOST, 2, 1).add(Kind.COLLECT, HOST, 2)
    assert log.write().race is None


def test_an_execution_dispatched_before_the_log_began_is_ignored():
    assert Log().write().read(77).write().race is None


def test_components_are_shared_by_executions_that_follow_each_other():
    log = Log().write()
    for number in range(1, 200):
        log.step(number, before=number - 1).stream_waits(READ_DONE, number).write()
        if number > 1:
            log.add(Kind.COLLECT, HOST, number - 1)
    assert log.race is None
    assert log.order.num_components == 1


def test_sharing_components_hides_no_race():
    """Of two executions that overlap, waiting for the second one does not cover the first."""
    log = Log().write().publish(1)
    for launch in (1, 2):
        log.dispatch(launch).acquire(execution(launch), WRITE_DONE, 1).read(launch)
        log.release(execution(launch), READ_DONE, launch)
    assert log.order.num_components == 2
    assert log.stream_waits(READ_DONE, 2).write().race is not None


# -- failures ----------------------------------------------------------------------------------------------------------


def test_reads_of_a_launch_that_was_given_up_do_not_matter():
    log = Log().write().step(1).add(Kind.GIVE_UP, HOST, 1)
    assert log.write().read(1).write().race is None


def test_giving_up_a_launch_gives_up_its_prep_program_but_not_a_step_that_ended():
    log = Log().write(row=1).write(row=2).publish(1)
    for launch in (1, 2):
        log.dispatch(launch).acquire(execution(launch), WRITE_DONE, 1).read(launch, row=launch)
    log.add(Kind.COLLECT, OTHER_HOST, 1)
    log.dispatch(3, before=1).add(Kind.OPERAND, HOST, 3, 2).add(Kind.GIVE_UP, HOST, 3)
    assert log.write(row=2).race is None
    assert log.write(row=1).race is not None


def test_launches_that_fail_again_and_again_share_a_component():
    log = Log().write()
    for number in range(1, 50):
        log.dispatch(number).acquire(execution(number), WRITE_DONE, number).add(Kind.GIVE_UP, HOST, number)
    assert log.order.num_components == 1


# -- staging -----------------------------------------------------------------------------------------------------------


def stage(log: Log, step: StageStep, actor: int, block: int = 0) -> Log:
    return log.add(Kind.STAGE, actor, AREA, block, step, 1)


def staged_once() -> Log:
    log = Log()
    stage(stage(log, StageStep.ACQUIRE, HOST), StageStep.FILL, HOST)
    log.operation(OperationType.COPY)
    return stage(stage(log, StageStep.READ, STREAM), StageStep.RELEASE, STREAM)


def test_a_block_filled_again_after_it_was_seen_free_is_ordered():
    log = staged_once()
    assert stage(stage(log, StageStep.ACQUIRE, HOST), StageStep.FILL, HOST).race is None


def test_a_block_filled_again_without_looking_races_with_the_copy():
    race = stage(staged_once(), StageStep.FILL, HOST).race
    assert race is not None and race.is_staging and race.row == 0


def test_another_block_does_not_conflict():
    assert stage(staged_once(), StageStep.FILL, HOST, block=1).race is None


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_names_both_sides():
    log = Log().write().step(16).stream_waits(READ_DONE, 16).write().step(17, before=16)
    race = log.write().race
    assert race is not None
    assert report(race, NAMES, STRINGS) == (
        "race on block_tables row 3 (columns 0..2)\n"
        "  write  by the schedule stream, enqueued after the launch of step 17, at scheduler.py:5 _plan\n"
        "  read   by step 17's execution (target, decode[batch=4]), at handlers.cc:7 snapshot\n"
        "  nothing orders them: the schedule stream had last waited for target.read_done generation 16; "
        "step 17's execution had last waited for write_done generation 17"
    )


def test_the_report_of_a_staging_block():
    race = stage(staged_once(), StageStep.FILL, HOST).race
    assert race is not None
    assert report(race, NAMES, STRINGS).splitlines()[:2] == [
        "race on staging block 0",
        "  fill   by host thread 1, at scheduler.py:5 _plan",
    ]


# -- following the real journal ----------------------------------------------------------------------------------------


def write_one(stream, buffer) -> None:
    stream.write_rows(buffer, np.array([1], np.int32), np.ones((1, 3), np.int32))


def test_two_streams_that_do_not_wait_for_each_other_race():
    check = RaceCheck()
    try:
        buffer = native.SharedBuffer(2, 3, False, "a table")
        streams = [native.Stream(2, 64, 20.0, name=name) for name in ("one", "two")]
        write_one(streams[0], buffer)
        write_one(streams[1], buffer)
        for stream in streams:
            stream.sync()
        for _ in range(2):  # found once, said always
            with pytest.raises(RaceError, match="race on a table row 1"):
                check.check()
    finally:
        check.close()
    assert not journal.is_on()


def test_two_streams_with_an_event_between_them_do_not():
    check = RaceCheck()
    try:
        buffer, ring = native.SharedBuffer(2, 3, False), native.EventRing("ring", 2)
        streams = [native.Stream(2, 64, 20.0) for _ in range(2)]
        generation = ring.reserve()
        streams[1].wait(ring, generation)
        write_one(streams[1], buffer)
        write_one(streams[0], buffer)
        streams[0].record(ring, generation)
        for stream in streams:
            stream.sync()
        check.check()
    finally:
        check.close()


def test_a_log_with_a_hole_is_refused():
    check = RaceCheck()
    subscriptions = journal._consumers
    try:
        for consumer in list(subscriptions):
            consumer(np.zeros(0, journal.ENTRY), 7)
        with pytest.raises(JaxserveError, match="lost 7 journal entries"):
            check.check()
    finally:
        check.close()


def test_any_thread_may_check():
    check = RaceCheck()
    try:
        buffer, stream = native.SharedBuffer(2, 3, False), native.Stream(2, 64, 20.0)
        failures = []

        def work() -> None:
            try:
                for _ in range(100):
                    check.check()
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(100):
            write_one(stream, buffer)
        for thread in threads:
            thread.join()
        stream.sync()
        check.check()
        assert not failures
    finally:
        check.close()
