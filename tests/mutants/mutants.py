"""Faults planted on purpose: each is one small change to the package, and names the test that must notice it.

A test that no mutant can fail proves nothing; a mutant that no test kills is a fault we would ship. `make mutants`
tries them all, each in a copy of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`text` stands exactly once in `file`, which is a path below src/busload; `test` is a pytest node id."""

    name: str
    file: str
    text: str
    replacement: str
    test: str
    why: str

    def planted(self, source: str) -> str:
        found = source.count(self.text)
        if found != 1:
            raise LookupError(f"{self.name}: its text occurs {found} times in {self.file}, wanted once.")
        return source.replace(self.text, self.replacement)


COALESCING = "tests/chaos/test_coalescing.py::"
SIGNALS = "tests/worker/test_os_signals.py::"
OUTAGES = "tests/worker/test_outages.py::"
SETTLE = "tests/commands/test_settle.py::"
CLAIM = "tests/commands/test_claim.py::"
GATE = "tests/batches/test_budget_gate.py::"
FAIR = "tests/commands/test_fair_turns.py::"
FORECAST = "tests/batches/test_forecast.py::"
RESCUE = "tests/commands/test_rescue.py::"
JOB_BATCHES = "tests/jobs/test_batches_of_jobs.py::"
CANCEL = "tests/commands/test_cancel_command.py::"
DEDUP = "tests/commands/test_dedup.py::"
CONCURRENCY = "tests/limits/test_concurrency.py::"
ORDER = "tests/limits/test_order.py::"
TRACE = "tests/tasks/test_trace.py::"
COUNTING = "tests/dispatch/test_counting.py::"
TOLD = "tests/dispatch/test_told_of_commands.py::"

MUTANTS = [
    # -- the fence
    Mutant(
        "lease-survives-its-rescue",
        "commands/rescue.sql",
        "DELETE FROM busload.lease WHERE lease_id IN (SELECT lease_id FROM lease)",
        "DELETE FROM busload.lease WHERE lease_id IN (SELECT lease_id FROM lease) AND false",
        SETTLE + "test_a_late_worker_cannot_settle_a_rescued_command",
        "The lease is the fence: while it exists, a worker that was taken for dead can settle what others run.",
    ),
    Mutant(
        "a-group-is-settled-without-its-events",
        "buffers/groups.py",
        "        credited = yield from settle.credited([transition])\n",
        "        credited = yield from settle.settle([transition], now=now)\n",
        "tests/buffers/test_groups.py::test_a_lease_that_comes_back_while_its_group_ends_leaves_no_event_behind",
        "A group whose lease comes back while it ends would be completed, and its events stay for ever.",
    ),
    Mutant(
        "settle-does-not-lock-the-lease",
        "commands/settle.sql",
        "     ORDER BY l.lease_id\n       FOR UPDATE OF l\n",
        "     ORDER BY l.lease_id\n",
        SETTLE + "test_a_settlement_that_waited_for_a_rescue_moves_nothing",
        "A rescue and a settlement of the same lease would both go through.",
    ),
    Mutant(
        "release-does-not-wait-for-a-settlement",
        "commands/rescue.py",
        "    yield from hold(leases)\n",
        "",
        SETTLE + "test_what_was_settled_is_seen_by_a_release_that_waited_for_it",
        "A snapshot from before the settlement puts what it settled back into the queue.",
    ),
    Mutant(
        "anybodys-attempt-is-credited",
        "commands/settle.sql",
        "ON e.command = mine.id AND e.lease_id = mine.lease_id",
        "ON e.command = mine.id",
        COALESCING + "test_a_late_result_is_not_credited_although_the_new_holder_has_settled_the_same_attempt",
        "A late worker is told that its result counts, although that of the new holder does.",
    ),
    # -- held batches
    Mutant(
        "held-batches-are-claimed",
        "postgres/schema/0004_batches.sql",
        "CREATE VIEW busload.ready AS\nSELECT * FROM busload.queue\n WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT "
        "b.batch_id FROM busload.batch AS b\n                                        WHERE (b.canceling_until IS NOT "
        "NULL OR b.held_at IS NOT NULL)",
        "CREATE VIEW busload.ready AS\nSELECT * FROM busload.queue\n WHERE CASE WHEN batch_id = ANY (ARRAY(SELECT "
        "b.batch_id FROM busload.batch AS b\n                                        WHERE (b.canceling_until IS NOT "
        "NULL)",
        "tests/batches/test_hold.py::test_an_operators_retry_waits_with_the_held_batch",
        "What comes back to a held batch would run, though a person has stopped it.",
    ),
    Mutant(
        "retries-expire",
        "commands/expire.sql",
        "attempt = 1 AND crashes = 0\n",
        "crashes = 0\n",
        "tests/batches/test_expiry.py::test_a_retry_has_started_before_and_does_not_expire",
        "A command that has begun its work would be canceled in the middle of it.",
    ),
    # -- counters and completion
    Mutant(
        "batches-are-locked-in-any-order",
        "postgres/schema/0004_batches.sql",
        "WHERE batch_id = ANY (batches) ORDER BY batch_id FOR NO KEY UPDATE",
        "WHERE batch_id = ANY (batches) FOR NO KEY UPDATE",
        COALESCING + "test_flushes_over_the_same_batches_in_any_order_never_deadlock",
        "Two flushes that lock the same batches in another order deadlock.",
    ),
    Mutant(
        "a-completion-counts-twice",
        "postgres/schema/0004_batches.sql",
        "b.completed_count + d.completed,",
        "b.completed_count + d.completed + (d.completed > 1)::int,",
        COALESCING + "test_a_flush_that_fails_in_passing_is_repeated_and_nothing_dropped[short-40001]",
        "Counters must be what was recorded, not about as much.",
    ),
    Mutant(
        "completes-with-something-in-troubleshooting",
        "postgres/schema/0004_batches.sql",
        "AND completed_count + failed_count + canceled_count = total_count",
        "AND completed_count + failed_count + canceled_count + in_troubleshooting_count >= total_count",
        COALESCING + "test_one_result_that_cannot_be_stored_is_parked_alone[22P05-500-1]",
        "A command that waits for a person has not ended.",
    ),
    Mutant(
        "completes-before-it-is-sealed",
        "postgres/schema/0004_batches.sql",
        "AND sealed_at IS NOT NULL\n           AND completed_at IS NULL\n           AND completed_count",
        "AND completed_at IS NULL\n           AND completed_count",
        "tests/batches/test_open_batch.py::"
        "test_a_batch_whose_members_have_all_ended_completes_with_its_seal_and_not_before",
        "More commands may come.",
    ),
    Mutant(
        "the-end-is-looked-for-too-early",
        "postgres/schema/0004_batches.sql",
        "canceled_count + in_troubleshooting_count = total_count)",
        "canceled_count + in_troubleshooting_count = total_count - 1)",
        COALESCING + "test_a_flush_that_fails_in_passing_is_repeated_and_nothing_dropped[short-40001]",
        "The settlement of the last command is the only one that can complete the batch.",
    ),
    Mutant(
        "loads-forget-the-domains-of-their-commands",
        "commands/load.py",
        "yield NewLoad(group[0].domain or domain, ",
        "yield NewLoad(domain, ",
        "tests/batches/test_cross_domain.py::"
        "test_commands_run_in_their_own_domains_and_are_counted_by_their_batch[in one statement]",
        "A command runs in its own domain, not in that of its batch.",
    ),
    # -- canary and failure budget
    Mutant(
        "the-canary-lets-the-rest-go-too-early",
        "postgres/schema/0004_batches.sql",
        "ELSIF b.completed_count >= b.canary_count THEN",
        "ELSIF b.completed_count > 0 THEN",
        "tests/batches/test_guards.py::test_the_rest_waits_for_the_last_of_the_canary",
        "All commands of the canary must have completed before the others start.",
    ),
    Mutant(
        "the-budget-is-exceeded-one-failure-late",
        "postgres/schema/0004_batches.sql",
        "        IF used > allowed THEN",
        "        IF used > allowed + 1 THEN",
        "tests/batches/test_guards.py::test_the_failure_that_exceeds_the_budget_holds_the_batch[FAILED]",
        "The failure that exceeds the budget holds the batch.",
    ),
    Mutant(
        "a-resumed-budget-holds-at-once-again",
        "postgres/schema/0004_batches.sql",
        "THEN b.failed_count + b.in_troubleshooting_count\n                                  ELSE b.budget_from END\n"
        "          FROM held",
        "THEN 0\n                                  ELSE b.budget_from END\n          FROM held",
        "tests/batches/test_guards.py::test_after_a_resume_the_budget_starts_anew",
        "A person has decided about what had failed by then.",
    ),
    Mutant(
        "a-worker-without-a-gate",
        "worker/claimer.py",
        "                self._line.gate = self._gate\n",
        "                pass\n",
        GATE + "test_a_worker_that_exceeds_the_budget_begins_no_more_than_one_flush_past_it[plain]",
        "Whatever stands in line would run before the first results count.",
    ),
    Mutant(
        "a-settlement-that-looks-for-no-hold",
        "worker/settlement.py",
        "        await self.look_for_holds(transitions)\n",
        "",
        GATE + "test_a_worker_that_hears_of_nothing_begins_no_more_than_one_flush_past_the_budget[plain]",
        "The gate would open though the budget is exceeded.",
    ),
    Mutant(
        "a-transaction-that-looks-for-no-hold",
        "worker/settlement.py",
        "            await self._settlement.look_for_holds([transition])\n",
        "",
        GATE + "test_a_worker_that_hears_of_nothing_begins_no_more_than_one_flush_past_the_budget"
        "[in transactions of their own]",
        "The gate would open though the budget is exceeded.",
    ),
    Mutant(
        "what-waits-at-the-gate-stays-there",
        "worker/stuck_line.py",
        "            self.take_out(late_at_gate)",
        "            pass",
        GATE + "test_what_waits_for_its_budget_keeps_no_others_from_running",
        "A batch that somebody has locked would take up all of the worker's line.",
    ),
    Mutant(
        "a-canary-of-all-never-passes",
        "postgres/schema/0004_batches.sql",
        "                                      THEN coalesce(canary_ended_at, statement_timestamp())\n"
        "                                      ELSE canary_ended_at END,\n               status",
        "                                      THEN canary_ended_at\n"
        "                                      ELSE canary_ended_at END,\n               status",
        "tests/batches/test_guards.py::test_a_canary_that_is_all_of_its_batch_passes_with_it[there is none]",
        "Whoever waits for the canary to pass would wait for ever.",
    ),
    # -- settling
    Mutant(
        "repetition-is-not-looked-up",
        "commands/settle.sql",
        "     WHERE NOT EXISTS (\n        SELECT FROM busload.execution AS e",
        "     WHERE true OR NOT EXISTS (\n        SELECT FROM busload.execution AS e",
        COALESCING + "test_a_flush_whose_answer_is_lost_is_sent_again_and_counts_once",
        "A flush that was committed without an answer can then never be repeated.",
    ),
    Mutant(
        "repetition-is-not-expected",
        "commands/settle.py",
        "except pg.UniqueViolation:",
        "except pg.ExclusionViolation:",
        COALESCING + "test_a_flush_whose_answer_is_lost_is_sent_again_and_counts_once",
        "What is in the database already looks like a result that cannot be stored.",
    ),
    Mutant(
        "lease-is-not-closed",
        "commands/settle.sql",
        "WHERE open <= 0",
        "WHERE open < 0",
        SETTLE + "test_the_last_settlement_closes_the_lease",
        "Leases with nothing to run would pile up.",
    ),
    Mutant(
        "last-result-wins",
        "worker/settlement.py",
        "if first.outcome != COMPLETED and transition.outcome == COMPLETED:",
        "if transition is not first:",
        COALESCING + "test_the_completion_counts_among_several_results_for_one_execution[COMPLETED FAILED_ATTEMPT "
        "FAILED_ATTEMPT]",
        "A completion that is overwritten by a late failure runs again.",
    ),
    Mutant(
        "last-results-of-a-batch-wait",
        "worker/settlement.py",
        "self._last_batches.add(lease.batch_id)",
        "pass",
        COALESCING + "test_the_last_results_of_a_batch_do_not_wait_for_others_to_join_them",
        "A batch would complete with the next full flush, whenever that is.",
    ),
    # -- the coalescer
    Mutant(
        "flush-drops-on-error",
        "worker/coalescer.py",
        "                await asyncio.sleep(pause)",
        "                return None",
        COALESCING + "test_a_flush_that_fails_in_passing_is_repeated_and_nothing_dropped[short-40001]",
        "Results are kept until the commit is known.",
    ),
    Mutant(
        "every-error-blames-an-item",
        "worker/coalescer.py",
        "if (halve and isinstance(error, REFUSALS)) or",
        "if halve or",
        COALESCING + "test_a_flush_that_fails_in_passing_is_repeated_and_nothing_dropped[short-40001]",
        "An error that passes is no reason to park a command.",
    ),
    Mutant(
        "a-limit-of-the-server-passes",
        "worker/coalescer.py",
        "    psycopg.errors.ProgramLimitExceeded,",
        "    # psycopg.errors.ProgramLimitExceeded,",
        COALESCING + "test_one_result_that_cannot_be_stored_is_parked_alone[54000-500-1]",
        "A result that is too long or too deep for the server would be tried for ever, and all others with it.",
    ),
    Mutant(
        "halving-forgets-a-half",
        "worker/coalescer.py",
        "parts[:1] = [part[:middle], part[middle:]]",
        "parts[:1] = [part[:middle]]",
        COALESCING + "test_one_result_that_cannot_be_stored_is_parked_alone[22P05-500-1]",
        "The neighbours of a result that cannot be stored are settled all the same.",
    ),
    Mutant(
        "refused-item-is-dropped",
        "worker/coalescer.py",
        "await self._insist(partial(on_refused, part[0], refused), 1, halve=False)",
        "pass",
        COALESCING + "test_one_result_that_cannot_be_stored_is_parked_alone[22P05-500-1]",
        "A result that cannot be stored still has to become something that can.",
    ),
    Mutant(
        "close-does-not-flush",
        "worker/coalescer.py",
        "        self._due.set()\n        if self._task is not None:",
        "        self._due.set()\n        if self._task is None:",
        COALESCING + "test_a_result_handed_over_while_it_closes_is_flushed_or_refused_but_never_hangs",
        "What is held when it closes would be lost.",
    ),
    Mutant(
        "put-drops-when-full",
        "worker/coalescer.py",
        "            await self._room.wait()",
        "            return",
        COALESCING + "test_a_result_handed_over_while_it_closes_is_flushed_or_refused_but_never_hangs",
        "When it is full it waits; it never drops.",
    ),
    Mutant(
        "closed-and-still-taking",
        "worker/coalescer.py",
        "        if self._closing:\n            raise",
        "        if self._closing and self._task is None:\n            raise",
        COALESCING + "test_a_result_handed_over_while_it_closes_is_flushed_or_refused_but_never_hangs",
        "What is handed over after the last flush would wait for ever.",
    ),
    # -- claiming, and what stands in line
    Mutant(
        "owners-take-no-turns",
        "postgres/schema/0004_batches.sql",
        "WHERE w.commands < most OR w.owners < least(8, most)",
        "WHERE w.commands < most",
        FAIR + "test_a_small_batch_starts_at_once_behind_a_large_one",
        "A claim that stops at the first batch with enough commands lets all others wait for it.",
    ),
    Mutant(
        "a-worker-forgets-whose-turn-it-was",
        "worker/claimer.py",
        "                    self._turns |= taken.turns\n",
        "                    pass\n",
        FAIR + "test_workers_go_round",
        "Each claim would begin with the oldest large batch, and the others would wait for all of it.",
    ),
    Mutant(
        "a-worker-never-asks-whose-turn-it-is",
        "worker/claimer.py",
        "                self._all_fits = len(taken.leased) < limit and not taken.contended\n",
        "                self._all_fits = True\n",
        FAIR + "test_workers_go_round",
        "Only a worker that has found room for all may leave the turns out.",
    ),
    Mutant(
        "a-retry-belongs-to-nobody",
        "commands/settle.sql",
        "o.forgiven, o.replies, o.fair,",
        "o.forgiven, o.replies, 0,",
        FAIR + "test_a_command_that_comes_back_has_the_same_owner",
        "Retries of all batches would share one turn.",
    ),
    Mutant(
        "claim-waits-for-locked-loads",
        "commands/claim.sql",
        "LIMIT w.loads\n           FOR UPDATE SKIP LOCKED\n",
        "LIMIT w.loads\n           FOR UPDATE\n",
        CLAIM + "test_what_others_have_locked_is_skipped_and_said_to_be_contended",
        "Workers would queue behind each other.",
    ),
    Mutant(
        "claims-without-room-for-the-results",
        "worker/claimer.py",
        "limit = min(concurrency + ahead, self._settlement.room - waiting) - in_hand",
        "limit = concurrency + ahead - in_hand",
        COALESCING + "test_results_that_were_handed_over_and_not_flushed_run_again_and_no_others",
        "A kill would cost more than the settlement may hold.",
    ),
    Mutant(
        "line-of-any-length",
        "worker/pace.py",
        "return int(self._rate * self.horizon)",
        "return 1000 + int(self._rate * self.horizon)",
        COALESCING + "test_slow_handlers_hold_no_more_than_they_run",
        "A worker with slow handlers would keep from others what it cannot run.",
    ),
    Mutant(
        "hand-back-burns-an-attempt",
        "commands/claim.sql",
        "SELECT {load} FROM load\n    RETURNING",
        "SELECT lo, hi, domain, batch_id, priority, attempt + 1, forgiven, crashes, replies, fair FROM load\n"
        "    RETURNING",
        COALESCING + "test_what_stands_in_line_behind_stuck_handlers_is_handed_back_and_run_by_others",
        "What was never started has not been tried.",
    ),
    Mutant(
        "handed-back-and-released-too",
        "commands/rescue.sql",
        "c.id <> ALL (l.returned) AND e.recorded IS NULL",
        "e.recorded IS NULL",
        RESCUE + "test_given_back_commands_do_not_come_back_twice",
        "A command would be in the queue twice.",
    ),
    # -- stopping
    Mutant(
        "stop-starts-the-line",
        "worker/claimer.py",
        "self._take_out(self._line.items)",
        "pass",
        SIGNALS + "test_what_stands_in_line_is_handed_back_and_others_run_it",
        "A worker that stops begins nothing new.",
    ),
    Mutant(
        "stop-releases-nothing",
        "worker/lifecycle.py",
        "await self._hand_back.release(self._held.lease_ids)",
        "await self._hand_back.release([])",
        SIGNALS + "test_what_does_not_finish_within_the_grace_time_is_handed_back",
        "Others would have to wait for the end of the lease.",
    ),
    Mutant(
        "release-burns-an-attempt",
        "commands/rescue.sql",
        "SELECT part.lo, part.hi, domain, batch_id, priority, attempt, forgiven, crashes, replies",
        "SELECT part.lo, part.hi, domain, batch_id, priority, attempt + 1, forgiven, crashes, replies",
        SIGNALS + "test_what_does_not_finish_within_the_grace_time_is_handed_back",
        "A deployment would eat up the attempts of long commands.",
    ),
    Mutant(
        "stop-does-not-settle",
        "worker/lifecycle.py",
        "abandoned = await self._settlement.close(timedelta(seconds=last.left))",
        "abandoned = 0",
        SIGNALS + "test_what_runs_is_finished_and_the_rest_is_left[SIGTERM]",
        "Results that wait for their flush would be made again.",
    ),
    Mutant(
        "stop-is-silent-about-results-it-gave-up",
        "worker/lifecycle.py",
        "        if abandoned:\n",
        "        if abandoned < 0:\n",
        OUTAGES + "test_a_worker_that_cannot_settle_before_it_stops_says_so",
        "Whoever runs workers must hear that commands will run again.",
    ),
    Mutant(
        "heartbeat-outlives-the-retirement",
        "worker/lifecycle.py",
        "                await asyncio.to_thread(self._heartbeat.stop)\n"
        "                await self._shared.perform(rescue.retire(worker=self._shared.number))\n",
        "                await self._shared.perform(rescue.retire(worker=self._shared.number))\n"
        "                await asyncio.to_thread(self._heartbeat.stop)\n",
        "tests/worker/test_coming_back.py::test_no_heartbeat_registers_a_worker_again_after_it_has_retired",
        "A heartbeat that found the worker retired would register it again, and nobody would retire it.",
    ),
    # -- identity
    Mutant(
        "a-key-is-held-for-its-window-only",
        "commands/send.sql",
        "t.held_until <= statement_timestamp() AND NOT busload.is_open(t.domain, t.command_id)",
        "t.held_until <= statement_timestamp()",
        DEDUP + "test_a_key_is_held_while_its_command_is_open_whatever_its_age[open_running]",
        "A second command is admitted though the first still runs.",
    ),
    Mutant(
        "an-end-by-other-hands-does-not-free-a-key",
        "postgres/schema/0006_tasks.sql",
        "'CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')\n",
        "'CANCELED')\n",
        DEDUP + "test_a_key_is_free_again_after_the_end_and_the_window[ended_completed_by_an_operator]",
        "A key stays held for ever by a command that an operator has ended.",
    ),
    Mutant(
        "is-open-sees-an-old-snapshot",
        "postgres/schema/0006_tasks.sql",
        "LANGUAGE plpgsql VOLATILE",
        "LANGUAGE plpgsql STABLE",
        DEDUP + "test_thirty_two_senders_at_once_one_wins",
        "Who waited for the winner does not see its command, takes the key for free and wins as well.",
    ),
    Mutant(
        "keys-are-held-in-any-order",
        "commands/send.sql",
        ' ORDER BY task_key COLLATE "C"\n',
        "",
        DEDUP + "test_lists_of_the_same_keys_in_any_order_do_not_deadlock[joined]",
        "Two lists with the same keys wait for each other.",
    ),
    Mutant(
        "the-last-of-a-list-counts",
        "commands/send.py",
        "first.setdefault(command.task_key, command.command_id)",
        "first[command.task_key] = command.command_id",
        DEDUP + "test_many_are_judged_row_by_row_and_answered_in_order[arrays]",
        "Results would not be those of the input's order.",
    ),
    Mutant(
        "an-emptied-batch-stays-open",
        "commands/send.py",
        "        yield from open_batch(batch)\n        yield from seal(batch.domain, batch.batch_id)\n",
        "        yield from open_batch(batch)\n",
        DEDUP + "test_a_batch_that_dedup_empties_completes_at_once_with_its_callback",
        "A batch of which dedup left nothing would never complete.",
    ),
    Mutant(
        "a-checkpoint-forgets-what-came-meanwhile",
        "batches/open_batch.py",
        "async with self._writing:  # what others add meanwhile is for the next one",
        "if True:",
        DEDUP + "test_adding_at_once_loses_nothing",
        "Two checkpoints at once would write the same commands.",
    ),
    Mutant(
        "separators-are-not-escaped",
        "commands/dedup.py",
        '.replace(":", "%3A")',
        "",
        DEDUP + "test_separators_inside_parts_cannot_make_two_keys_collide",
        "Two tasks would share a key.",
    ),
    Mutant(
        "a-lost-attempt-is-left-out-of-the-chain",
        "commands/search.sql",
        "FROM event AS v WHERE v.type IN ('LEASE_LOST', 'RELEASED')",
        "FROM event AS v WHERE v.type IN ('RELEASED')",
        TRACE + "test_a_lost_attempt_is_in_the_chain",
        "The chain would hide that a worker died under the task.",
    ),
    Mutant(
        "an-operators-action-hangs-on-every-attempt",
        "commands/search.sql",
        "WHERE v.id = c.id AND v.attempt = a.attempt",
        "WHERE v.id = c.id",
        TRACE + "test_retrying_out_of_troubleshooting_keeps_the_key_and_names_the_operator",
        "Nobody could tell after which attempt an operator acted.",
    ),
    Mutant(
        "attempts-share-the-time-of-their-task",
        "commands/search.sql",
        "v.type = 'OPERATOR_RETRIED' AND v.attempt = a.attempt - 1",
        "false",
        "tests/tasks/test_tracker.py::test_each_attempt_has_its_own_time_and_its_count_of_retries",
        "A task that was retried would seem to have waited since its failure.",
    ),
    Mutant(
        "names-of-a-queue-do-not-know-of-each-other",
        "tasks/track.py",
        "    yield from execute(SQL.lock_task, task_key=task_id)\n",
        "",
        "tests/tasks/test_tracker.py::test_a_task_is_the_same_under_every_name_of_its_queue",
        "Producers that give a queue's name with and without its prefix could both win.",
    ),
    Mutant(
        "refused-results-are-reported-as-settled",
        "worker/coalescer.py",
        "            unwritten += len(part) - written if isinstance(written, int) else 0\n",
        "            unwritten += 0\n",
        "tests/worker/test_stats.py::test_a_lost_lease_and_its_late_results_are_counted",
        "Figures, metrics and log would tell of results that the database has refused.",
    ),
    Mutant(
        "latencies-err-downwards",
        "worker/stats.py",
        "        self._note_wait(end - done, now)\n",
        "        self._note_wait(min(1, end - done), now)\n",
        "tests/worker/test_stats.py::test_latencies_err_upwards_and_by_sixteen_items_at_most",
        "Results would wait longer than the figures say.",
    ),
    Mutant(
        "a-fence-is-used-twice",
        "tasks/track.sql",
        "THEN %(fresh)s::uuid ELSE a.lease_id END AS lease_id",
        "THEN a.lease_id ELSE a.lease_id END AS lease_id",
        "tests/tasks/test_tracker_faults.py::test_zombies_are_never_credited",
        "A worker that was taken for dead would hold the id of whoever took its task over.",
    ),
    Mutant(
        "a-lapsed-lease-is-not-taken-over",
        "tasks/track.py",
        "        if lapsed:\n",
        "        if False:\n",
        "tests/tasks/test_tracker_faults.py::test_a_dead_worker_with_very_many_tasks_is_taken_over_whole",
        "The message of a dead worker would be acknowledged away.",
    ),
    Mutant(
        "a-decision-moves-what-failed-after-it",
        "troubleshooting/decisions.sql",
        " AND t.since <= %(until)s::timestamptz",
        "",
        "tests/troubleshooting/test_causes.py::test_what_fails_again_is_not_moved_by_a_decision_from_before",
        "Two decisions about the same cause would try everything twice.",
    ),
    Mutant(
        "a-patch-forgets-what-was-before",
        "troubleshooting/decisions.sql",
        "'before', t.data, 'after', i.data::json",
        "'before', i.data::json, 'after', i.data::json",
        "tests/troubleshooting/test_causes.py::test_a_patched_retry_changes_the_data_and_keeps_every_change",
        "The audit could not reproduce the change.",
    ),
    Mutant(
        "a-claim-under-way-outruns-a-pause",
        "worker/claimer.py",
        "elif self._pauses.paused is not paused:",
        "elif False:",
        "tests/limits/test_pause.py::test_what_a_claim_under_way_brings_after_the_pause_does_not_start",
        "Commands of a paused domain would start.",
    ),
    Mutant(
        "prune-ignores-an-open-lease",
        "postgres/schema/0012_retention.sql",
        "WHERE l.hi BETWEEN ended.id AND (ended.id OPERATOR(pg_catalog.|) 1023)\n"
        "                          AND l.lo <= ended.id OFFSET 0)",
        "WHERE false)",
        "tests/retention/test_prune.py::test_a_lease_that_is_open_for_neighbours_stays_right",
        "A repeated settlement would count a command again whose execution was removed.",
    ),
    Mutant(
        "prune-removes-open-members",
        "retention/prune.sql",
        "ARRAY(SELECT id FROM ended WHERE id >> 10 NOT IN (SELECT load FROM kept))",
        "ARRAY(SELECT id FROM member)",
        "tests/retention/test_prune.py::test_an_open_command_of_a_batch_that_says_it_is_complete_stays",
        "Work that has not ended would be gone.",
    ),
    # -- concurrency limits
    Mutant(
        "call-begins-with-a-lost-permit",
        "worker/permits.py",
        "if not alive or self.worker != self.shared.number or self.freed:",
        "if not alive:",
        CONCURRENCY + "test_a_call_does_not_begin_with_a_permit_that_was_lost",
        "A worker that comes back would call beside the one that has its permit.",
    ),
    Mutant(
        "frozen-worker-loses-its-permits-early",
        "limits/concurrency.sql",
        "WHERE w.worker = p.worker AND w.stopped_at IS NULL)",
        "WHERE w.worker = p.worker AND w.seen_at > now() - w.lease_for)",
        CONCURRENCY + "test_the_share_of_a_dead_worker_is_freed_and_not_before_it_is_declared_dead",
        "A worker that is only late still runs its calls.",
    ),
    Mutant(
        "permits-are-granted-side-by-side",
        "postgres/schema/0009_limits.sql",
        "    PERFORM busload.lock_limits($2, $3);\n",
        "",
        CONCURRENCY + "test_who_asks_while_a_permit_is_being_taken_waits_for_the_answer",
        "Two workers that ask at the same moment would both get the last permit.",
    ),
    Mutant(
        "everything-fits",
        "postgres/schema/0009_limits.sql",
        "SELECT coalesce(max(k.calls) <= asked.most, true)",
        "SELECT true",
        CONCURRENCY + "test_never_more_calls_of_a_key_run_than_its_limit",
        "Whoever asks would get a permit, however many calls run.",
    ),
    Mutant(
        "permit-is-granted-before-it-is-on-the-disk",
        "limits/concurrency.sql",
        "pg_logical_emit_message(true, 'busload', '')",
        "''",
        "tests/chaos/test_concurrency_limits.py::test_a_permit_outlasts_a_crash_of_the_server",
        "After a crash of the server, others would get the permits of calls that run.",
    ),
    Mutant(
        "who-waits-does-not-see-who-frees",
        "postgres/schema/0009_limits.sql",
        "    PERFORM busload.lock_waiting($2, $3, true);\n",
        "",
        CONCURRENCY + "test_who_asks_while_a_permit_is_being_freed_gets_it",
        "The command would wait though the permit is free, until a sweep finds it.",
    ),
    Mutant(
        "who-frees-does-not-see-who-waits",
        "postgres/schema/0009_limits.sql",
        "    PERFORM busload.lock_waiting($1, $2, false);\n",
        "",
        CONCURRENCY + "test_who_frees_a_permit_while_a_command_begins_to_wait_lets_it_ask_again",
        "The command would wait though the permit is free, until a sweep finds it.",
    ),
    Mutant(
        "paused-domain-is-woken-for-its-limit",
        "postgres/schema/0009_limits.sql",
        "AND s.domain <> ALL (r.paused) AND",
        "AND",
        CONCURRENCY + "test_a_paused_domain_does_not_keep_others_waiting_for_their_limit",
        "What nobody may claim would be let go, one in each sweep, and everybody else would wait.",
    ),
    Mutant(
        "order-ignores-a-locked-load",
        "limits/order.sql",
        "(SELECT min(hi) FROM candidate WHERE hi NOT IN (SELECT hi FROM free)),",
        "NULL::bigint,",
        ORDER + "test_a_load_that_somebody_has_locked_is_not_overtaken",
        "What comes behind a command that somebody is about to cancel, or not, would overtake it.",
    ),
    Mutant(
        "order-is-entered-side-by-side",
        "limits/order.sql",
        "pg_advisory_xact_lock(27711007, hashtext(%(domain)s::text))",
        "NULL",
        ORDER + "test_one_worker_at_a_time_claims_in_a_domain",
        "A worker would enter later commands of a key before the one that has claimed the earlier ones.",
    ),
    Mutant(
        "retry-loses-its-place",
        "postgres/schema/0009_limits.sql",
        "s.reason IN ('RETRY', 'RATE_LIMITED', 'NO_HANDLER')",
        "s.reason IN ('RATE_LIMITED', 'NO_HANDLER')",
        ORDER + "test_a_retry_runs_before_its_successors",
        "The successors of a command would run while it waits for its retry.",
    ),
    Mutant(
        "order-goes-by-priority",
        "postgres/schema/0009_limits.sql",
        "FROM (SELECT owner.priority, owner.fair FROM owner ORDER BY owner.hi LIMIT most) AS o",
        "FROM (SELECT owner.priority, owner.fair FROM owner LIMIT most) AS o",
        ORDER + "test_commands_are_claimed_in_the_order_of_sending_whatever_their_priority",
        "A command of a higher priority would overtake its predecessors.",
    ),
    Mutant(
        "successor-runs-beside-a-thread-that-outlives-its-time",
        "worker/executor.py",
        "if overdue is not None and handler.ordered:",
        "if False:",
        ORDER + "test_a_thread_that_outlives_its_time_keeps_its_successors_waiting",
        "The retry of a call would run beside the call.",
    ),
    Mutant(
        "send-takes-a-lower-id-than-one-before",
        "commands/send.sql",
        "(SELECT last_value FROM busload.load_number) = %(id)s::bigint >> 10)",
        "true)",
        ORDER + "test_who_sends_after_another_send_has_returned_gets_a_higher_id",
        "A command would run before one that was sent, and had returned, before it.",
    ),
    # -- compensation
    Mutant(
        "stages-are-undone-in-the-order-they-were-done",
        "jobs/progress.py",
        "for stage in reversed(stages[: job.position + 1]):",
        "for stage in stages[: job.position + 1]:",
        "tests/jobs/test_compensation.py::test_a_job_that_fails_undoes_its_stages_in_reverse",
        "A flight would be given back before the hotel that was booked for it.",
    ),
    Mutant(
        "a-parked-compensation-stops-the-rest",
        "postgres/schema/0004_batches.sql",
        "awaited || array_agg(batch_id) FILTER (WHERE goes_on)",
        "awaited",
        "tests/jobs/test_compensation.py::test_a_compensation_that_fails_is_recorded_and_does_not_stop_the_rest",
        "What other stages have done would stay until a person looks.",
    ),
    # -- batches of jobs
    Mutant(
        "a-resumed-job-still-counts-as-failed",
        "postgres/schema/0005_jobs.sql",
        "sum((j.status = 'FAILED')::integer - (o.status = 'FAILED')::integer) AS failed",
        "sum((j.status = 'FAILED')::integer) AS failed",
        JOB_BATCHES + "test_a_job_that_is_resumed_or_canceled_after_it_failed_moves_between_the_counters",
        "A job would be counted twice: as failed, and as what it is after its resume.",
    ),
    Mutant(
        "a-complete-batch-of-jobs-is-counted-again",
        "jobs/progress.py",
        """    yield from _refuse_if_counted(job, "resumed")
""",
        "",
        JOB_BATCHES + "test_a_failure_that_a_complete_batch_has_counted_stays",
        "The counters of a batch would change after its callback has told them.",
    ),
    Mutant(
        "an-open-batch-of-jobs-loses-those-that-have-ended",
        "retention/prune.sql",
        " AND NOT {in_young_batch}",
        "",
        JOB_BATCHES + "test_a_batch_of_jobs_and_its_jobs_are_kept_and_removed_together",
        "The batch would count jobs that nobody can look at any more.",
    ),
    Mutant(
        "a-claim-waits-for-the-batch-of-jobs",
        "postgres/schema/0005_jobs.sql",
        "FOR NO KEY UPDATE OF b SKIP LOCKED;",
        "FOR NO KEY UPDATE OF b;",
        JOB_BATCHES + "test_a_batch_starts_with_the_first_of_its_jobs_and_no_claim_waits_for_its_row",
        "One open transaction would stop the claims of every worker.",
    ),
    Mutant(
        "a-canceled-batch-of-jobs-is-left-half-way",
        "worker/sweep.py",
        """        await _try(conn, jobs.cancel_stragglers())
""",
        "",
        JOB_BATCHES + "test_a_worker_goes_on_with_a_cancel_whose_process_died",
        "Jobs of a canceled batch would go on for ever if whoever canceled it has died.",
    ),
    # -- methods as handlers
    Mutant(
        "half-an-object-is-registered",
        "handlers/methods.py",
        "Trial(self.handlers.copy())",
        "Trial(self.handlers)",
        "tests/handlers/test_methods.py::test_a_duplicate_registers_none_of_an_object_and_the_first_handler_stays",
        "A worker would serve some commands of a service whose other half was refused.",
    ),
    # -- single commands
    Mutant(
        "request-to-stop-is-forgotten-by-settlement",
        "commands/settle.sql",
        "                         WHERE s.command = o.id AND s.attempt > h.forgiven\n",
        "                         WHERE s.command = o.id AND s.attempt > h.attempt\n",
        CANCEL + "test_what_was_asked_to_stop_is_not_tried_again",
        "A command that a person has canceled would be tried again if its attempt fails before the worker has heard.",
    ),
    Mutant(
        "request-to-stop-is-forgotten-for-a-later-attempt",
        "commands/cancel.sql",
        "coalesce(place.forgiven < s.attempt, false)",
        "coalesce(place.forgiven < 0, false)",
        CANCEL + "test_a_settlement_that_waited_for_the_cancel_and_did_not_see_it_does_not_undo_it",
        "A command that a person has canceled would be tried again if its attempt failed at the same moment.",
    ),
    Mutant(
        "request-to-stop-dies-with-the-worker",
        "commands/rescue.sql",
        "l.canceled OR i.stopping IS NOT NULL AS canceled",
        "l.canceled AS canceled",
        CANCEL + "test_what_was_asked_to_stop_does_not_outlive_its_worker",
        "A command that a person has canceled would run again after a crash.",
    ),
    Mutant(
        "cancel-takes-the-neighbours-before-it-along",
        "commands/cancel.sql",
        "'hi', %(command)s::bigint - 1) AS range WHERE p.lo < %(command)s::bigint",
        "'hi', %(command)s::bigint - 1) AS range WHERE p.lo > %(command)s::bigint",
        CANCEL + "test_a_load_is_split_around_the_command",
        "The part of a load before a canceled command would be in no place, and never run.",
    ),
    Mutant(
        "request-to-stop-outlives-its-attempt",
        "commands/settle.sql",
        "                         WHERE s.command = o.id AND s.attempt > h.forgiven\n",
        "                         WHERE s.command = o.id AND s.attempt <= h.attempt\n",
        CANCEL + "test_an_operators_retry_is_not_stopped_by_an_older_request",
        "A command that an operator retries would end at its first failure, because somebody had canceled it before.",
    ),
    Mutant(
        "reschedule-lets-go-what-waits-for-a-canary",
        "commands/reschedule.py",
        'if reason in ("HELD", "CANARY"):',
        'if reason in ("HELD",):',
        "tests/commands/test_reschedule.py::test_what_is_held_with_its_batch_is_not_let_go_alone",
        "One command could run before the canary of its batch has ended well.",
    ),
    Mutant(
        "search-leaves-out-a-command-between-pages",
        "commands/listing.py",
        "begin = found[-1][0] if found else after",
        "begin = found[-1][0] - 1 if found else after",
        "tests/commands/test_listing.py::test_pages_neither_overlap_nor_leave_anything_out",
        "Whoever pages through commands would miss the first one of every page but the first.",
    ),
    # -- health
    Mutant(
        "an-outage-restarts-workers",
        "cli/metrics_server.py",
        "ok=not health.restart_helps",
        "ok=health.state is not HealthState.CRITICAL",
        "tests/cli/test_worker.py::test_probes_tell_whether_a_worker_lives_and_takes_work",
        "Kubernetes would kill every worker, with the results it keeps, whenever the database is away.",
    ),
    Mutant(
        "failures-are-never-forgotten",
        "worker/settlement.py",
        "            self.failures_in_row = 0\n",
        "            pass\n",
        "tests/health/test_health.py::test_ten_failures_in_a_row_degrade_a_worker_until_an_attempt_succeeds",
        "A worker that works again would stay DEGRADED.",
    ),
    # -- counting, and what commands tell of the broker
    Mutant(
        "a-pruned-batch-is-forgotten",
        "retention/prune.sql",
        "      FROM busload.counted_batch AS c JOIN gone USING (batch_id)\n",
        "      FROM busload.counted_batch AS c JOIN gone USING (batch_id) WHERE false\n",
        COUNTING + "test_a_day_stays_as_it_was_when_it_is_pruned",
        "The figures of a past day would fall whenever something of it is removed.",
    ),
    Mutant(
        "a-success-is-taken-back",
        "dispatch/creation_state.sql",
        "   SET rounds = rounds + 1, retry_needed = true, published_at = NULL,\n",
        "   SET rounds = rounds + 1, retry_needed = true, published_at = NULL, first_published_at = NULL,\n",
        COUNTING + "test_the_rate_of_a_day_does_not_fall_when_commands_are_published_again",
        "A command that is tried again while the broker is away would turn a published batch into a failed one.",
    ),
    Mutant(
        "a-forecast-forgets-retries",
        "batches/forecast.py",
        "    due = max(outlook.last_retry, outlook.last_planned)\n",
        "    due = outlook.last_planned\n",
        FORECAST + "test_a_batch_is_not_done_before_its_last_retry_or_its_last_run_at",
        "A batch would be said to be done while commands of it wait for their next attempt.",
    ),
    Mutant(
        "a-canceled-command-is-pace",
        "postgres/schema/0004_batches.sql",
        "(CASE WHEN ran THEN u.completed + u.failed",
        "(CASE WHEN true THEN u.completed + u.failed",
        FORECAST + "test_the_pace_counts_what_ran_to_an_end_and_fades",
        "A batch of which much is canceled would seem to go very fast.",
    ),
    Mutant(
        "a-held-batch-has-a-forecast",
        "batches/forecast.py",
        "    if outlook.held is not None and waits:\n",
        "    if outlook.held is not None and not outlook.left:\n",
        FORECAST + "test_each_reason_is_found_in_the_database",
        "A batch that nobody lets go on would be said to be done soon.",
    ),
    Mutant(
        "a-young-batch-seems-slow",
        "batches/forecast.py",
        " / (scale * -math.expm1(-age / scale))",
        " / scale",
        FORECAST + "test_a_batch_that_has_just_begun_is_not_taken_for_a_slow_one",
        "A batch of twenty seconds would be judged as if it had been idle for a thousand before.",
    ),
    Mutant(
        "only-the-broker-tells-of-creations",
        "dispatch/create_batch.py",
        "    log_creation(batch, count, insert_ms=took, total_ms=took, transport=via.transport, strategy=strategy)\n",
        "    pass\n",
        COUNTING + "test_every_batch_that_is_created_is_told_of",
        "Batches without a broker would be created without a word.",
    ),
    Mutant(
        "no-worker-recovers",
        "worker/broker_stations.py",
        "for loop in (self._relaying, self._recovering)]",
        "for loop in (self._relaying,)]",
        "tests/dispatch/test_relay.py::test_a_running_worker_recovers_by_itself",
        "Commands whose messages were lost would wait until somebody calls `recover`.",
    ),
    Mutant(
        "news-of-a-message-counts-twice",
        "dispatch/outbox.sql",
        "v.details ->> 'publication' = p.published::json ->> 'publication' OFFSET 0",
        "false OFFSET 0",
        TOLD + "test_news_that_comes_twice_is_told_once",
        "A relay whose answer was lost repeats its report: the command would have been published twice.",
    ),
    Mutant(
        "an-unmarked-message-was-not-sent",
        "dispatch/creation_state.sql",
        "       greatest(d.written - o.commands - w.commands, d.confirmed),\n",
        "       d.written - o.commands - w.commands,\n",
        "tests/stories/test_dispatch.py::test_a_mark_that_fails_is_a_warning_and_moves_nothing_backwards",
        "A report with a warning would say that nothing was published although all of it was.",
    ),
    Mutant(
        "a-queue-serves-two-domains",
        "dispatch/envelope.py",
        "        if other != domain:\n",
        "        if False:\n",
        "tests/dispatch/test_existing_queues.py::test_a_wrong_mapping_is_refused",
        "The workers of one domain would put aside the messages of the other.",
    ),
]
