/* The write-after-read barrier as a model for `spin`. docs/barrier.md explains it to a newcomer; run.py runs it.
 *
 * Six processes:   Host             plans, launches, fences, collects; runs one step ahead (the overlap schedule)
 *                  Stream           the schedule stream: copies, waits and records, in order
 *                  Exec x 2         XLA executions, chained by data flow (donated pool); the second chain starts with the
 *                                   fresh pool after a failure, while programs of the first may still run
 *                  Prep x 2         the prep programs of PRE_REPLAY phases, one per runner. No data flow ties them to the
 *                                   step programs that run at the same time
 *
 * Shared rows hold version numbers. A launch carries the versions its plan wrote, and every read compares:
 *   newer than planned = overwritten before it was read (WAR);  older = read before it was written (RAW).
 *
 * Size:            -DSTEPS=n  -DRING=n (event slots)  -DNSTAGE=n (staging blocks)  -DMAXFAIL=n  -DMAXRECYCLE=n
 * Read ends:       any of the four in every phase; -DONLY_IN or -DONLY_PRE keeps to one
 * Steps allowed:   -DWITH_SPEC (target + draft runner)  -DWITH_NGRAM ; plain steps always
 * Variants:        -DNO_MARKER (programs without FFI operations)  -DNGRAM_RELAY (drafts are snapshotted too)
 * Done twice:      -DWITHOUT_CLEAR_WHEN_LAUNCH_FAILS or -DWITHOUT_CLEAR_WHEN_RECOVERING: one of two clears is enough here
 * Granularity:     -DFINE_GRAINED (every step of the host interleaved)
 * Faults:          -DMUTANT_... , listed in mutants.txt
 *
 * Lines printed with a leading @ become the rows of a counterexample: @ lane text.
 */

#ifndef STEPS
#define STEPS 3
#endif
#ifndef RING
#define RING 3
#endif
#ifndef NSTAGE
#define NSTAGE 4
#endif
#ifndef MAXFAIL
#define MAXFAIL 0
#endif
#ifndef MAXRECYCLE
#define MAXRECYCLE 1
#endif

/* Names in printed lines. */
mtype = { target, draft, plan_row, table_row, write_done, target_read_done, draft_read_done, target_step_done,
          draft_step_done };
#define RUNNER_NAME(li) (RUNNER(li) == T -> target : draft)
#define RING_NAME(r) \
  (r == 0 -> write_done : (r == 1 -> target_read_done : (r == 2 -> draft_read_done : (r == 3 -> target_step_done : draft_step_done))))

#define T 0 /* target runner */
#define D 1 /* draft runner */

/* -- declared read ends, kinds of steps ------------------------------------------------------------------------------ */

mtype = { PRE, IN, POST, UNKNOWN };          /* SharedReadEnds */
mtype = { PLAIN, SPEC, SPEC_SKIPPED, NGRAM };
/* PLAIN         target phase;                  owner: target
 * SPEC          target phase, draft phase;     owner: draft (EAGLE, STANDALONE, MTP)
 * SPEC_SKIPPED  target phase, the draft phase is left out (eager fallback, nothing left to draft); owner: still draft
 * NGRAM         target phase that keeps reading the rows behind its marker; owner: target, mailbox cleared */

/* -- event rings: csrc/common/generations.* ---------------------------------------------------------------------------- */

mtype = { OWED, RECORDED, ABANDONED };

#define WRITE_DONE 0
#define READ_DONE(runner) (1 + (runner))
#define STEP_DONE(runner) (3 + (runner))
#define NUM_RINGS 5

typedef Slot {
  byte generation;
  mtype state;
  byte waiters /* announced waits: they pin the slot */
}
Slot slots[NUM_RINGS * RING];
byte newest[NUM_RINGS]; /* newest reserved generation */

#define SLOT_OF(ring, g) slots[(ring) * RING + (g) % RING]

/* Ready for a wait that names generation g: recorded, given up, or so old that the slot serves a later one. */
#ifdef MUTANT_RERECORD_AWAITED
#define SETTLED(ring, g) (SLOT_OF(ring, g).state != OWED) /* an event without generations: whatever its slot holds now */
#else
#define SETTLED(ring, g) (SLOT_OF(ring, g).generation > (g) || SLOT_OF(ring, g).state != OWED)
#endif

/* jaxserve.barrier.tickets.reserve: blocks while the slot still owes a record. What Generations::reserve would then raise
 * for, a slot that is still awaited, must never happen. */
inline reserve(ring, out) {
  atomic {
#ifndef MUTANT_RERECORD_AWAITED
    SLOT_OF(ring, newest[ring] + 1).state != OWED;
    if
    :: SLOT_OF(ring, newest[ring] + 1).waiters > 0 ->
       printf("@ host !! AWAITED: the slot for generation %d is pinned by a wait\n", newest[ring] + 1);
       assert(false)
    :: else
    fi;
#endif
    newest[ring]++;
    out = newest[ring];
    SLOT_OF(ring, out).generation = out;
    SLOT_OF(ring, out).state = OWED
  }
}

inline record(ring, g) {
#ifdef MUTANT_LATE_RECORD_COUNTS
  SLOT_OF(ring, g).state = RECORDED
#else
  if
  :: SLOT_OF(ring, g).generation == (g) -> SLOT_OF(ring, g).state = RECORDED
  :: else /* the slot serves a later generation: a late record must not touch it */
  fi
#endif
}

inline abandon(ring, g) {
  if
  :: SLOT_OF(ring, g).generation == (g) && SLOT_OF(ring, g).state == OWED -> SLOT_OF(ring, g).state = ABANDONED
  :: else
  fi
}

byte epoch;    /* which chain new launches join; launches of an older one were given up: their results are dropped */
byte accepted; /* newest step whose accepted tokens are in the relay */

/* -- shared rows, staging, the schedule stream: csrc/cpu/stream.cc ---------------------------------------------------------- */

#define PLAN 0  /* rewritten for every step: lengths, batch slots, draft tokens. Version = step */
#define TABLE 1 /* block table of one slot. Version = step that admitted its sequence, 0 = cleared */
byte row[2];

byte staged[NSTAGE];
bool staging_busy[NSTAGE];
byte next_staging;

mtype = { COPY, RECORD, WAIT, GATHER };
chan stream = [12] of { mtype, byte, byte };
bool stream_idle = true;

active proctype Stream() {
  mtype op;
  byte a, b;
end:
  do
  :: atomic { stream?op, a, b -> stream_idle = false };
     if
     :: op == COPY -> atomic {
          row[a] = staged[b];
#ifndef MUTANT_STAGING_UNGUARDED
          staged[b] = 0; /* nobody looks at a free block; fewer states to tell apart */
#endif
          staging_busy[b] = false;
          printf("@ stream copies %e := %d\n", (a == PLAN -> plan_row : table_row), row[a])
        }
     :: op == RECORD -> atomic {
          record(WRITE_DONE, a);
          printf("@ stream records write_done(%d)\n", a)
        }
     :: op == WAIT -> atomic {
#ifdef MUTANT_WAIT_IGNORES_TICKET
          true; /* bound to the newest record issued so far, which is an old one */
#else
          SETTLED(a, b);
#endif
          if
          :: SLOT_OF(a, b).generation == b && SLOT_OF(a, b).waiters > 0 -> SLOT_OF(a, b).waiters--
          :: else
          fi;
          printf("@ stream passes its wait for %e(%d)\n", RING_NAME(a), b)
        }
     :: op == GATHER -> atomic { /* only a mutant reads accepted tokens here */
          printf("@ stream gathers the accepted tokens of step %d\n", a);
          if
          :: accepted < a && b == epoch -> printf("@ stream !! RAW: step %d has not written them yet\n", a); assert(false)
          :: else
          fi
        }
     fi;
     atomic { op = 0; a = 0; b = 0; stream_idle = true }
  od
}

/* -- executions: step programs and prep programs ------------------------------------------------------------------------- */

#define RUNNER(li) ((li) % 2)
#define STEP(li) ((li) / 2)
#define NEVER 255

/* launch number (2 * step + runner), resolved ends, kind, write_done, read_done, step_done, planned versions */
chan exec[2] = [4] of { byte, mtype, mtype, byte, byte, byte, byte, byte };
/* launch number, chain, write_done, read_done, planned versions */
chan prep[2] = [3] of { byte, byte, byte, byte, byte, byte };

byte finished_to[2]; /* per chain: newest launch that ended */
byte failed_at[2];   /* per chain: first launch that failed; everything behind it fails with it */
byte prepared[2];    /* per runner: newest launch whose prep program has ended */
byte failures = MAXFAIL;

/* Compares the rows with the plan. Only a launch that was given up, or already failed with what it depends on (its prep
 * may still run), may read something else: nothing it computes is ever delivered. */
#define COUNTS(chain, launch) (chain == epoch && failed_at[chain] > (launch))
inline read_rows(chain, launch, want_plan, want_table) {
  atomic {
    printf("@ exec step %d, %e: reads plan=%d table=%d\n", STEP(launch), RUNNER_NAME(launch), row[PLAN], row[TABLE]);
    if
    :: COUNTS(chain, launch) && (row[PLAN] > want_plan || (row[PLAN] == want_plan && row[TABLE] != want_table)) ->
       printf("@ exec !! WAR: wanted plan=%d table=%d\n", want_plan, want_table); assert(false)
    :: COUNTS(chain, launch) && row[PLAN] < want_plan ->
       printf("@ exec !! RAW: wanted plan=%d table=%d\n", want_plan, want_table); assert(false)
    :: else
    fi
  }
}

/* A step program. What it does with the rows follows from where its reads truly end, `ends`. */
proctype Exec(byte chain) {
  byte li, g_write, g_read, g_step, want_plan, want_table;
  mtype ends, kind;
end:
  do
  :: exec[chain]?li, ends, kind, g_write, g_read, g_step, want_plan, want_table ->
     /* Everything of a failed execution's chain fails with it, before it runs. */
     if
     :: failed_at[chain] != NEVER -> goto failed
     :: else
     fi;
     /* PRE: the private rows are an operand, so prep has ended; others wait for the row writes themselves. */
     if
     :: ends == PRE && prepared[RUNNER(li)] >= li
     :: ends != PRE && (g_write == 0 || SETTLED(WRITE_DONE, g_write))
     fi;
#if MAXFAIL > 0
     if
     :: atomic { failures > 0 && chain == epoch -> failures-- }; goto failed
     :: true
     fi;
#endif
     /* The head of the program: the snapshot. */
     if
     :: ends == PRE
#if defined(MUTANT_PRE_WHILE_READING_LIVE) || defined(MUTANT_UNSOUND_FALLBACK)
        -> read_rows(chain, li, want_plan, want_table)
#endif
     :: ends == IN ->
#ifdef MUTANT_PUBLISH_BEFORE_READS
        atomic { record(READ_DONE(RUNNER(li)), g_read);
          printf("@ exec step %d, %e: records read_done(%d)\n", STEP(li), RUNNER_NAME(li), g_read) };
        read_rows(chain, li, want_plan, want_table)
#else
        read_rows(chain, li, want_plan, want_table);
        atomic { record(READ_DONE(RUNNER(li)), g_read);
          printf("@ exec step %d, %e: records read_done(%d)\n", STEP(li), RUNNER_NAME(li), g_read) }
#endif
     :: ends == POST || ends == UNKNOWN -> read_rows(chain, li, want_plan, want_table)
     fi;
     /* The layers. */
     if
     :: ends == POST || ends == UNKNOWN -> read_rows(chain, li, want_plan, want_table)
#ifndef NGRAM_RELAY
     :: kind == NGRAM && ends != POST && ends != UNKNOWN -> read_rows(chain, li, want_plan, want_table)
#endif
     :: else
     fi;
#if MAXFAIL > 0
     if
     :: atomic { failures > 0 && chain == epoch -> failures-- }; goto failed
     :: true
     fi;
#endif
     /* The end: tokens into the relay, then the end record. */
     atomic {
       if
       :: chain == epoch && RUNNER(li) == T -> accepted = STEP(li)
       :: else
       fi;
       if
       :: ends == POST -> record(READ_DONE(RUNNER(li)), g_read)
       :: else
       fi;
       record(STEP_DONE(RUNNER(li)), g_step);
       finished_to[chain] = li;
       printf("@ exec step %d, %e: ends, records step_done(%d)\n", STEP(li), RUNNER_NAME(li), g_step);
       goto next
     };
failed:
     atomic {
       if
       :: failed_at[chain] == NEVER -> failed_at[chain] = li
       :: else
       fi;
#ifdef NO_MARKER /* the completion watcher gives the records up; otherwise that waits for the host */
       if
       :: g_read != 0 -> abandon(READ_DONE(RUNNER(li)), g_read)
       :: else
       fi;
       abandon(STEP_DONE(RUNNER(li)), g_step);
#endif
       finished_to[chain] = li;
       printf("@ exec step %d, %e: fails\n", STEP(li), RUNNER_NAME(li))
     };
next:
     atomic { li = 0; ends = 0; kind = 0; g_write = 0; g_read = 0; g_step = 0; want_plan = 0; want_table = 0 }
  od
}

/* The prep program of a PRE_REPLAY phase: reads the rows ahead of the step program and records where the reads end.
 * Inside one step the draft's prep must be tied to the target's program by data flow (an operand): otherwise it may run,
 * and record, while the target still reads. */
active [2] proctype Prep() { /* process 1 for the target, 2 for the draft runner: Stream is process 0 */
  byte li, chain, g_write, g_read, want_plan, want_table;
end:
  do
  :: prep[_pid - 1]?li, chain, g_write, g_read, want_plan, want_table ->
     g_write == 0 || SETTLED(WRITE_DONE, g_write);
#ifndef MUTANT_DRAFT_PREP_UNCHAINED
     RUNNER(li) == T || finished_to[chain] >= li - 1;
#endif
#ifndef MUTANT_PRE_WHILE_READING_LIVE
     read_rows(chain, li, want_plan, want_table);
#endif
     atomic {
       record(READ_DONE(RUNNER(li)), g_read);
       prepared[RUNNER(li)] = li;
       printf("@ exec step %d, %e: prep ends, records read_done(%d)\n", STEP(li), RUNNER_NAME(li), g_read);
       li = 0; chain = 0; g_write = 0; g_read = 0; want_plan = 0; want_table = 0
     }
  od
}

/* -- the host: scheduler, runners, engine loop ------------------------------------------------------------------------------ */

byte mailbox[2]; /* ModelRunner.shared_read_done_event: a generation of read_done, 0 = None */
bool all_done;       /* everything was collected and drained */

/* SharedRows._write: into a staging block, which must be free, then a copy on the stream. */
inline write_row(which, version) {
  atomic {
#ifndef MUTANT_STAGING_UNGUARDED
    !staging_busy[next_staging];
#endif
    staged[next_staging] = version;
    staging_busy[next_staging] = true;
    stream!COPY(which, next_staging);
    next_staging = (next_staging + 1) % NSTAGE;
    printf("@ host writes %e := %d\n", (which == PLAN -> plan_row : table_row), version)
  }
}

/* SharedRows.wait: announces the wait, which pins the slot, and queues it. */
inline stream_wait(ring, g) {
  atomic {
    if
    :: SLOT_OF(ring, g).generation == (g) -> SLOT_OF(ring, g).waiters++
    :: else
    fi;
    stream!WAIT(ring, g);
    printf("@ host makes the stream wait for %e(%d)\n", RING_NAME(ring), g)
  }
}

#ifdef FINE_GRAINED
#define UNINTERRUPTED
#else
#define UNINTERRUPTED atomic
#endif

inline choose_ends(out) {
  if
#ifndef ONLY_PRE
  :: out = IN
#endif
#ifndef ONLY_IN
  :: out = PRE
#endif
#if !defined(ONLY_IN) && !defined(ONLY_PRE) && !defined(MUTANT_PRE_WHILE_READING_LIVE)
  :: out = POST
  :: out = UNKNOWN
#endif
  fi
}

/* StepRunner.execute of one phase. */
inline launch_phase(runner) {
  atomic {
    li = 2 * step + runner;
#ifndef MUTANT_NO_CLEAR_AT_PHASE_START
    mailbox[runner] = 0;
#endif
    choose_ends(ends);
#if defined(NO_MARKER) && !defined(MUTANT_UNSOUND_FALLBACK)
    /* A declared IN without a marker: the reads are hoisted into a prep program, or else end with the program. */
    if
    :: ends == IN -> if :: ends = PRE :: ends = POST fi
    :: else
    fi;
#endif
    printf("@ host step %d, %e: phase starts, reads end %e\n", step, RUNNER_NAME(li), ends)
  };
  reserve(STEP_DONE(runner), g_step);
  g_read = 0;
  if
  :: ends != UNKNOWN -> reserve(READ_DONE(runner), g_read)
  :: else
  fi;
#ifdef NO_MARKER
  SETTLED(WRITE_DONE, g_write); /* no handler in the program could wait, so the host does */
#endif
  if
#ifdef MUTANT_UNSOUND_FALLBACK
  :: ends == IN -> /* becomes PRE, but nothing is hoisted: the record comes first, the reads stay in the program */
     atomic {
       ends = PRE;
       record(READ_DONE(runner), g_read);
       prepared[runner] = li;
       mailbox[runner] = g_read;
       printf("@ host records read_done(%d) ahead of the launch\n", g_read)
     }
#endif
  :: ends == PRE ->
     prep[runner]!li, epoch, g_write, g_read, step, table;
#ifdef NO_MARKER
     prepared[runner] == li;
#endif
     mailbox[runner] = g_read
  :: else
  fi;
  if
  :: atomic { failures > 0 -> failures-- }; /* the dispatch raises */
     atomic {
       printf("@ host step %d, %e: the launch fails\n", step, RUNNER_NAME(li));
#if !defined(MUTANT_FAILURE_LEAVES_MAILBOX) && !defined(WITHOUT_CLEAR_WHEN_LAUNCH_FAILS)
       mailbox[runner] = 0;
#endif
       abandon(STEP_DONE(runner), g_step);
       if
       :: g_read != 0 -> abandon(READ_DONE(runner), g_read)
       :: else
       fi;
       goto recover
     }
  :: true
  fi;
  atomic {
#ifdef MUTANT_WRITES_NOT_AWAITED
    exec[epoch]!li, ends, kind, 0, g_read, g_step, step, table;
#else
    exec[epoch]!li, ends, kind, g_write, g_read, g_step, step, table;
#endif
    if
    :: ends == IN || ends == POST -> mailbox[runner] = g_read
    :: else
    fi;
    last_li = li;
    printf("@ host step %d, %e: launched\n", step, RUNNER_NAME(li))
  }
}

/* WarBarrier.apply: takes the owner's mailbox; an event means the fine fence, none the full execution. */
inline apply_barrier() {
  atomic {
    g_read = mailbox[owner];
#ifndef MUTANT_NO_CLEAR_ON_TAKE
    mailbox[owner] = 0;
#endif
    if
    :: g_read != 0 -> stream_wait(READ_DONE(owner), g_read)
#ifdef MUTANT_COARSE_FENCE_OF_TARGET
    :: else -> stream_wait(STEP_DONE(T), newest[STEP_DONE(T)])
#else
    :: else -> stream_wait(STEP_DONE(RUNNER(last_li)), g_step)
#endif
    fi;
    g_read = 0
  }
}

/* The sequence in the slot leaves: its table row is cleared, the slot is free for the next plan. */
inline release_slot() {
  write_row(TABLE, 0);
  table = 0
}

active proctype Host() {
  byte step, li, last_li, g_write, g_read, g_step, owner, recycles = MAXRECYCLE;
  byte table;                              /* admission in the slot, 0 = free; what the table row should say */
  byte flying_li, flying_table;            /* the launch in flight and the admission its tokens belong to */
  bool aborted;                            /* that admission was aborted meanwhile */
  mtype ends, kind;

  atomic { failed_at[0] = NEVER; failed_at[1] = NEVER; run Exec(0); run Exec(1) };

  do
  :: step == STEPS -> break
  :: else ->
     /* From here to the collection the host only queues work and touches what is its own. Such steps commute with those
      * of the other processes, so one atomic sequence (left wherever it blocks) loses no behaviour that matters; a
      * smaller run with FINE_GRAINED interleaves every step of it. */
     UNINTERRUPTED {
     /* Plan the next step from what is certain, and write the rows that change. */
     step++;
     if
     :: kind = PLAIN
#ifdef WITH_SPEC
     :: kind = SPEC
     :: kind = SPEC_SKIPPED
#endif
#ifdef WITH_NGRAM
     :: kind = NGRAM
#endif
     fi;
     atomic {
       owner = (kind == SPEC || kind == SPEC_SKIPPED -> D : T);
#ifdef MUTANT_WRONG_OWNER
       owner = T;
#endif
       printf("@ host plans step %d, %e\n", step, kind)
     };
     if
     :: table == 0 -> table = step; write_row(TABLE, step) /* admits a sequence to the free slot */
     :: else
     fi;
     write_row(PLAN, step);
     reserve(WRITE_DONE, g_write);
     stream!RECORD(g_write, 0);

#ifdef MUTANT_WAIT_BEFORE_DISPATCH
     if /* binds to the newest record there is: that of the step before */
     :: step > 1 -> stream_wait(STEP_DONE(T), newest[STEP_DONE(T)])
     :: else
     fi;
#endif
     launch_phase(T);
     if
     :: kind == SPEC -> launch_phase(D)
     :: else
     fi;
#if !defined(NGRAM_RELAY) && !defined(MUTANT_NGRAM_CLEAR_DELETED)
     if /* NGRAM's verify reads behind its marker, so the worker takes its event away */
     :: kind == NGRAM -> mailbox[T] = 0
     :: else
     fi;
#endif

     /* The barrier, right behind the launch. Only then may the slot of a sequence in its last step be released. */
#ifdef MUTANT_RECYCLE_BEFORE_BARRIER
     if
     :: table != 0 && recycles > 0 -> recycles--; release_slot()
     :: true
     fi;
#endif
#if defined(MUTANT_WAIT_BEFORE_DISPATCH)
     if
     :: step == 1 -> apply_barrier() /* ahead of the first launch there was nothing to wait for */
     :: else -> mailbox[T] = 0
     fi;
#elif !defined(MUTANT_NO_BARRIER)
     apply_barrier();
#endif
#ifdef MUTANT_ACCEPTED_READ_EARLY
     if /* as the scheduler of the original did when it filtered a batch */
     :: kind == NGRAM -> stream!GATHER(step, epoch)
     :: else
     fi;
#endif
     li = table;
     if
     :: table != 0 && recycles > 0 -> recycles--; release_slot()
     :: true
     fi;

     };

     /* Collect and commit the step before; the new one runs meanwhile. */
     if
     :: flying_li != 0 ->
        finished_to[epoch] >= flying_li;
        if
        :: failed_at[epoch] <= flying_li -> goto recover
        :: else
        fi;
        atomic {
          if
          :: accepted < STEP(flying_li) -> printf("@ host !! RAW: the step has not written its tokens\n"); assert(false)
          :: else
          fi;
          if
          :: aborted -> printf("@ host drops the tokens of step %d\n", STEP(flying_li))
          :: else -> printf("@ host delivers the tokens of step %d\n", STEP(flying_li))
#ifdef MUTANT_TOKENS_BY_SLOT
             ; if
             :: table != flying_table && table != 0 ->
                printf("@ host !! MISDELIVERED: they belong to admission %d, the slot to %d\n", flying_table, table); assert(false)
             :: else
             fi
#endif
          fi
        }
     :: else
     fi;
     atomic { flying_li = last_li; flying_table = li; aborted = false; last_li = 0; li = 0 };

     /* A stop token or an abort ends the sequence while the next step computes it once more. */
     if
     :: table != 0 && table == flying_table && recycles > 0 ->
        atomic { recycles--; aborted = true; printf("@ host admission %d is aborted\n", table) };
#ifdef MUTANT_TOKENS_BY_SLOT
        aborted = false;
#endif
        release_slot()
     :: true
     fi;
     goto next;

recover: /* Engine._fail_running */
     atomic {
       printf("@ host gives up what is in flight\n");
       epoch++;
       accepted = step; /* of a relay that nobody has written yet, nothing is read */
#ifndef MUTANT_FAILURE_NOT_ABANDONED
       li = 1;
       do
       :: li < NUM_RINGS ->
          g_read = 0;
          do
          :: g_read < RING ->
             if
             :: slots[li * RING + g_read].state == OWED -> slots[li * RING + g_read].state = ABANDONED
             :: else
             fi;
             g_read++
          :: else -> break
          od;
          li++
       :: else -> break
       od;
#endif
#if !defined(MUTANT_FAILURE_LEAVES_MAILBOX) && !defined(WITHOUT_CLEAR_WHEN_RECOVERING)
       mailbox[T] = 0; mailbox[D] = 0;
#endif
       li = 0; g_read = 0; last_li = 0; flying_li = 0; flying_table = 0; aborted = false; g_write = 0; g_step = 0;
       table = 0
     };
     empty(stream) && stream_idle; /* SharedRows.recover: drains the stream, then writes every row anew */
     write_row(TABLE, 0);
next:
     skip
  od;

  /* The last step. */
  if
  :: flying_li != 0 ->
     finished_to[epoch] >= flying_li;
     if
     :: failed_at[epoch] <= flying_li -> goto recover
     :: else -> flying_li = 0
     fi
  :: else
  fi;
  /* A run that is over leaves nothing behind: no owed record, no pinned slot. */
  atomic {
    empty(stream) && stream_idle;
    li = 0;
    do
    :: li < NUM_RINGS * RING ->
       if
       :: slots[li].waiters > 0 || slots[li].state == OWED -> printf("@ host !! LEFT: ring slot %d\n", li); assert(false)
       :: else
       fi;
       li++
    :: else -> break
    od;
    all_done = true
  }
}

#ifdef LIVENESS
ltl everything_is_fenced { <> all_done }
#endif
