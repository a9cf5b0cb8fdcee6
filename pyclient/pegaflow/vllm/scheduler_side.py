"""The connector inside vLLM's scheduler, which offers blocks and orders loads and saves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.engine.config import Settings
from pegaflow.engine.rates import LoadPolicy, preempted_in
from pegaflow.engine.view import View
from pegaflow.vllm.adapters import Adapters
from pegaflow.vllm.arrivals import ARRIVALS
from pegaflow.vllm.chunked import ChunkedLoads
from pegaflow.vllm.events import BlockEvents
from pegaflow.vllm.handover import Handover, Waits, is_asked_for, may_be_early
from pegaflow.vllm.hints import Hints, keys_report, report_chain, with_keys
from pegaflow.vllm.idle import IdleSteps
from pegaflow.vllm.keys import KeyChain
from pegaflow.vllm.loads import Loads
from pegaflow.vllm.lookups import Lookups
from pegaflow.vllm.messages import LoadOrder, StepPlan, WorkerReport
from pegaflow.vllm.metrics import Counts, Summary
from pegaflow.vllm.plans import BlockRules, Tables
from pegaflow.vllm.requests import (
    ALL_TOKENS,
    Load,
    RequestState,
    admitted_in,
    tables_of,
)
from pegaflow.vllm.resets import Resets
from pegaflow.vllm.saves import GpuBlocks, Saves
from pegaflow.vllm.undrafted import UndraftedBlocks

log = logging.getLogger("vllm.pegaflow")

#: The interval of reading the link's state, and the longest time until a new server is detected.
LINK_INTERVAL_S = 0.1

#: The share of the GPU's blocks that may be pinned, in percent, while another engine waits for some
#: of them.
HANDOVER_PINNED_PERCENT = 50


class SchedulerSide:
    """Bound to the scheduler's thread; no call waits longer than its deadline.

    ``in_lockstep``: other engine cores wait for each step of this one. ``recomputes``: vLLM
    computes what a load did not bring, instead of failing its request.
    """

    def __init__(
        self,
        session: Any,
        settings: Settings,
        *,
        rules: BlockRules,
        scheduler: bytes | None = None,
        ranks: int = 1,
        may_load: bool = True,
        may_save: bool = True,
        prefix_caching: bool = True,
        own_tables: bool = False,
        in_lockstep: bool = False,
        recomputes: bool = True,
        async_scheduling: bool = False,
        most_tokens: int = 8192,
        event_format: Any = None,
        adapters: Adapters | None = None,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._session = session
        self._settings = settings
        self.rules = rules
        self.unit_tokens = rules.unit_tokens
        self._may_load = may_load
        self._may_save = may_save
        self._own_tables = own_tables
        self._async_scheduling = async_scheduling
        self._clock = clock
        self._adapters = adapters or Adapters()
        #: The incarnation in the names of jobs; the session reports it to the server.
        self._incarnation = scheduler or _native.random_id()
        self.ranks = ranks
        self.loads = self._make_loads()
        self.events = self._make_events(event_format)
        self.policy = self._make_policy(most_tokens)
        self._lookups = self._make_lookups(follow=prefix_caching)
        self._waits = self._make_waits()
        self._recomputes = recomputes
        self.chunked = self._make_chunked()
        self._idle = self._make_idle(in_lockstep)
        ARRIVALS.begin()
        self.saves: Saves | None = None  # until vLLM shows its block pool
        self._undrafted = UndraftedBlocks(rules.unit_tokens)
        self._states: dict[str, RequestState] = {}
        self._generation = 0
        self._view = View(named=bool(settings.weights_id))
        self._resets = Resets(session, counts=self.counts, clock=clock)
        self._link: dict[str, Any] = {"state": "connecting"}
        self._server: Any = None  # incarnation of the one that was ready last
        self._away: dict[int, str] = {}  # ranks that cannot use the cache, and why
        self._name = name  # server and instance, for the line once all ranks use the cache
        self._serving: set[int] = set()  # ranks that have reported it
        self._link_seen_at = -LINK_INTERVAL_S
        self._summary = Summary(settings.log_interval_s, clock())
        self._shown: dict[str, Any] = {}

    def _make_events(self, event_format: Any) -> BlockEvents | None:
        if event_format is None:
            return None
        return BlockEvents(
            self._session,
            event_format,
            counts=self.counts,
            clock=self._clock,
            of_kinds=self.rules.has_kinds,
        )

    def _make_loads(self) -> Loads:
        return Loads(
            ranks=self.ranks,
            block_bytes=self.rules.block_bytes,
            patience_s=self._settings.load_patience_ms / 1e3,
            bytes_per_second=self._settings.load_bytes_per_second,
            counts=self.counts,
            clock=self._clock,
            labels=self.rules.labels,
            whole=self.rules.loads_are_whole,
        )

    def _make_policy(self, most_tokens: int) -> LoadPolicy:
        return LoadPolicy(
            always=self._settings.load_policy == "always",
            block_size=self.unit_tokens,
            most_tokens=most_tokens,
            queued_blocks=self.loads.queued_blocks,
            clock=self._clock,
        )

    def _make_waits(self) -> Waits:
        return Waits(
            self._session,
            patience_s=self._settings.handover_wait_ms / 1e3,
            follows=may_be_early(self.rules),
            direct=bool(self._settings.direct_group),
            counts=self.counts,
            clock=self._clock,
        )

    def _make_idle(self, in_lockstep: bool) -> IdleSteps:
        return IdleSteps(
            self._session,
            limit_s=0.0 if in_lockstep else self._settings.idle_step_ms / 1e3,
            counts=self.counts,
            clock=self._clock,
        )

    def _make_chunked(self) -> ChunkedLoads:
        return ChunkedLoads(
            waits=self._waits,
            lookups=self._lookups,
            loads=self.loads,
            unit_tokens=self.unit_tokens,
            counts=self.counts,
            unclaim=self._unclaim,
            node=lambda: bytes.fromhex(self._link.get("server", "")),
            clock=self._clock,
            bytes_per_second=self._settings.load_bytes_per_second,
        )

    def _make_lookups(self, *, follow: bool) -> Lookups:
        return Lookups(
            self._session,
            self._settings,
            self.loads,
            self.policy,
            rules=self.rules,
            follow=follow,
            counts=self.counts,
            clock=self._clock,
            events=self.events,
        )

    # ---- a request arrives, waits, is admitted, ends

    def bind_pool(self, pool: Any) -> None:
        if self.events is not None:
            self.events.bind_pool(pool)
        blocks = GpuBlocks(pool)
        if self._recomputes:
            self._waits.limit_blocks(blocks.count * self._settings.early_load_percent // 100)
        if self._may_save:
            share = blocks.count * self._settings.max_pinned_percent // 100
            self.saves = Saves(
                blocks,
                limit=max(self.rules.pins_at_once, share),
                handover_limit=blocks.count * HANDOVER_PINNED_PERCENT // 100,
                ranks=self.ranks,
                counts=self.counts,
                clock=self._clock,
                events=self.events,
                labels=self.rules.labels,
                undrafted=self._undrafted,
            )

    def new_request(self, request: Any) -> None:
        state = self._new_state(request)
        state.hints = Hints.read(request, self.counts)
        if self.events is not None:
            self.events.listen()
        # Some requests exist only to end, so that connectors are informed of it.
        if getattr(request, "abort_immediately", False):
            return
        self._report_chain(state)
        if not self._may_load:
            return
        if not self._waits.begin(state):
            self._lookups.ask(state)

    def _report_chain(self, state: RequestState) -> None:
        try:
            report_chain(self._session, state.request, state.chain, self.rules)
        except _native.PegaFlowError as error:
            log.debug("pegaflow: a prompt's blocks are not reported to routers: %s", error)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        state = self._state(request)
        state.offer_dropped = False
        if state.generation != self._generation:
            # vLLM asks only for a request that starts over, so all its KV belongs to this time.
            state.generation = self._generation
            state.chain = self._chain(request)
            state.progress = self.rules.progress(request, state.chain)
        if not self._may_load or getattr(request, "skip_reading_prefix_cache", False):
            state.progress.not_queried(local_tokens)
            return 0, False
        answer = self._matched_tokens(state, request, local_tokens)
        if answer[0] is None:
            self._idle.add_waiting(request.request_id)
        state.progress.queried(local_tokens)
        return answer

    def _matched_tokens(
        self, state: RequestState, request: Any, local_tokens: int
    ) -> tuple[int | None, bool]:
        if state.load_failed or not self._reset_done():
            return 0, False
        state.local_tokens = local_tokens
        if self._away:
            self._lookups.not_registered(state)
            self._waits.drop(state)
            return 0, False
        local = local_tokens // self.unit_tokens
        first = self._lookups.first_worth_loading(state, local)
        if self._lookups.is_worth_asking(state, local) and self._waits.is_waiting(
            state, local, first
        ):
            return None, False
        blocks = self._lookups.blocks_beyond(state, local)
        if blocks is None:
            return None, False
        tokens = blocks * self.unit_tokens
        stop = local + blocks
        if state.claim is not None and blocks and state.early is not None:
            # The other chunks' blocks come while the first one's are loaded.
            stop = state.claim.wanted_stop
            tokens = (stop - local) * self.unit_tokens
        if state.claim is not None and stop > state.claim.full_stop(stop):
            # With the prompt's partial block; its last token is computed, for the next one.
            tokens = request.num_tokens - 1 - local_tokens
        return tokens, blocks > 0

    def allocated(self, request: Any, tables: Tables, tokens: int) -> None:
        """vLLM has admitted the request, with ``tokens`` to be loaded behind its local blocks.

        ``tables``: its blocks, of each cache group.
        """
        state = self._state(request)
        if state.chunked is not None and state.chunked.is_open:
            return  # repeated for the same admission
        if self.chunked.begin(state, tables[0], tokens):
            state.offer_dropped = False
            return
        if state.early is not None and state.early.has_begun:
            self._waits.conclude(state, "over")  # with one claim for all, or none
        self._waits.drop(state)
        if tokens == 0:
            self._lookups.drop(state)
            local = state.local_tokens // self.unit_tokens * self.unit_tokens
            known = max(local, request.num_computed_tokens)
            self.policy.compute.begin(request.request_id, request.num_tokens - known)
            return
        if state.load is not None:
            return  # repeated for the same admission
        claim, state.claim = state.claim, None
        if claim is None and state.offer_dropped:
            # vLLM may allocate steps after its query.
            self.rules.refuse_load(self.loads, state, tables, tokens, "reset")
        else:
            self.rules.begin_load(self.loads, state, claim, tables, tokens)
        state.offer_dropped = False
        if self.rules.undrafted_from is not None:
            self._undrafted.allocated(tables[0][state.local_tokens // self.unit_tokens :])
            self._find_undrafted(state, tables)

    def loaded_from(self, request: Any, tokens: int) -> tuple[int, int]:
        """The numbers of tokens that a request loads from the pool and from other nodes."""
        state = self._states.get(request.request_id)
        load = state.load if state is not None else None
        if load is None:
            return tokens, 0
        here = min(tokens, (load.units - load.coming) * self.unit_tokens)
        return here, tokens - here

    def finished(self, request: Any, tables: Tables) -> dict[str, Any] | None:
        """The parameters of the response: a handover, and the prompt's keys, for a router that
        requested them.

        ``tables``: the request's blocks, of each cache group.
        """
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            return None
        report = {}
        if state.hints.reports_keys and not state.chain.doubt:
            report = keys_report(state.chain, request.num_prompt_tokens, self.unit_tokens)
        return with_keys(self._end(state, request, tables), report)

    def _end(self, state: RequestState, request: Any, tables: Tables) -> dict[str, Any] | None:
        del self._states[request.request_id]
        self._adapters.look_again()
        self.policy.compute.end(request.request_id)
        in_flight = self.chunked.abort(state)
        self._lookups.drop(state)
        self._waits.drop(state)
        if state.load is not None:
            # vLLM keeps its blocks until the workers report.
            self._unclaim(state.load)
            self.loads.abort(state.load)
        elif in_flight:
            pass  # the same
        elif self.saves is not None and state.generation == self._generation:
            tokens = min(self._written_tokens(request), state.drafted_tokens)
            if self._releases(state):
                return None
            if self._away:
                state.progress.drop(self.saves, tables, tokens, "not_registered")
            elif self._link["state"] == "ready":
                state.progress.collect(self.saves, tables, tokens, last=True)
                return self._hand_over(state)
            else:
                state.progress.drop(self.saves, tables, tokens, "no_server")
        return None

    def _releases(self, state: RequestState) -> bool:
        """Whether nothing of the request is saved any longer, because it will not be needed."""
        return state.hints.releases and not is_asked_for(state.request)

    def _unclaim(self, load: Load) -> None:
        if load.token:  # else it was refused without a claim
            self._session.unclaim(load.token)

    def _hand_over(self, state: RequestState) -> dict[str, Any] | None:
        if not is_asked_for(state.request) or self._view.is_private:
            return None
        return Handover(
            node=bytes.fromhex(self._link["server"]),
            scheduler=self._incarnation,
            job=state.progress.last_job,
            tokens=state.progress.handed_tokens(),
            may_be_early=may_be_early(self.rules),
        ).params()

    def _written_tokens(self, request: Any) -> int:
        """The number of tokens whose KV is in memory, not only scheduled."""
        in_flight = getattr(request, "num_in_flight_tokens", None)
        if in_flight is None:
            if self._async_scheduling:
                return 0  # an old release does not report it; its last blocks are not saved
            in_flight = 0
        return min(request.num_computed_tokens - in_flight, request.num_tokens)

    def _new_state(self, request: Any) -> RequestState:
        self._adapters.look_again()
        chain = self._chain(request)
        progress = self.rules.progress(request, chain)
        state = RequestState(request, chain, self._generation, progress)
        self._states[request.request_id] = state
        if self.saves is not None and is_asked_for(request):
            self.saves.hands_over = True
        return state

    def _chain(self, request: Any) -> KeyChain:
        return self.rules.chain(request, self._adapters, self._view.salt)

    def _state(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            return self._new_state(request)
        return state

    # ---- a step

    def plan(self, output: Any) -> StepPlan:
        """The workers' orders for this step."""
        self._lookups.new_step()
        self._watch_link()
        if self.events is not None:
            self.events.begin_step()
        orders = []
        if self.saves is not None:
            self._collect(output, self.saves)
            orders = self.saves.orders()
        self.chunked.poll(bool(self._away))
        loads = self.loads.not_handed_out()
        cancelled, discarded = self.loads.take_ends()
        for request_id in preempted_in(output):
            self.policy.compute.end(request_id)
        total = output.total_num_scheduled_tokens
        if total > 0 or loads:
            self._view.computed()
        plan = StepPlan(
            scheduler=self._incarnation,
            forward=total > 0,
            measured=self.policy.compute.plan(output.num_scheduled_tokens, total),
            saves=orders,
            loads=[self._order(load) for load in loads if not load.refused],
            refused=[self._order(load) for load in loads if load.refused],
            cancelled=cancelled,
            discarded=discarded,
            may_last=total == 0 and self._loads_end_soon(),
        )
        for request_id in self.chunked.waiting():
            self._idle.add_waiting(request_id)
        self._idle.end_step(len(self._states), is_idle=total == 0 and not self._is_in_flight())
        # Nothing fails from here on: the orders are handed out.
        if self.saves is not None:
            self.saves.mark_handed_out(orders)
        self.loads.mark_handed_out(loads)
        return plan

    def _loads_end_soon(self) -> bool:
        """Whether all requests wait for loads that follow their prefills, whose last blocks are
        computed. Such a load is not completed early, so the step that notices its end matters.
        """
        if not self._idle.limit_s or self.keep_stepping():
            return False
        ending = {one.request_id for one in self.loads.under_way() if one.is_ending}
        return bool(ending) and ending == self._states.keys()

    def _is_in_flight(self) -> bool:
        """Whether something ends that only a step notices: a load, a save, or an event."""
        return not all(one.is_quiet for one in self.loads.under_way()) or self.keep_stepping()

    def request_arrives(self) -> None:
        """vLLM's next step has another request. Thread-safe."""
        self._idle.interrupt()
        ARRIVALS.note()

    def _order(self, load: Load) -> LoadOrder:
        return self.loads.order(load, self.policy.held_to(load.units))

    def _collect(self, output: Any, saves: Saves) -> None:
        self._adapters.look_again()
        if self._own_tables:
            self._follow_tables(output)
        drafts = output.scheduled_spec_decode_tokens
        block_state = None if self._own_tables else output.kv_connector_block_state
        admitted = admitted_in(output)
        if self.rules.undrafted_from is not None:
            self._follow_drafts(output, self.rules.undrafted_from, block_state, admitted)
        if self._link["state"] != "ready" or self._away:
            return  # blocks wait for the cache as long as their requests live
        offered = getattr(block_state, "boundary_state_offloads", None) or {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is None or state.generation != self._generation or self._releases(state):
                continue
            request = state.request
            # This step's tokens are not counted yet, and placeholders have no hash: a block is
            # saved in the step that completes it, or in the one after.
            computed = request.num_computed_tokens + scheduled - len(drafts.get(request_id, ()))
            tokens = min(computed, request.num_tokens)
            offers = offered.get(request_id, ())
            if self.rules.awaits_next_token:
                if request_id in admitted:
                    continue  # vLLM's own hit may be of blocks that this very step computes
                # The draft model runs after the step's save, and the draft KV of a token is final
                # once the next token is.
                tokens = min(self._written_tokens(request) - 1, state.drafted_tokens)
            elif state.chain.adapter is not None:
                # Its files are checked after its KV was computed, not before. Offers end with the
                # step.
                tokens, offers = self._written_tokens(request), ()
            if not state.progress.has_work(tokens, offers):
                continue
            state.progress.collect(saves, tables_of(state, block_state), tokens, offers)

    def _follow_drafts(self, output: Any, limit: int, block_state: Any, admitted: set[str]) -> None:
        """Notes which tokens get no draft KV: in a step with a request of more than ``limit``
        tokens, none do.
        """
        self._undrafted.allocated_in(output)
        scheduled = output.num_scheduled_tokens
        states = [state for name in scheduled if (state := self._states.get(name)) is not None]
        stops = [s.request.num_computed_tokens + scheduled[s.request_id] for s in states]
        if max(stops, default=0) > limit:
            for state, stop in zip(states, stops, strict=True):
                if state.request_id in admitted:  # of an earlier time, tokens may be in flight
                    start = state.request.num_computed_tokens
                else:
                    start = self._written_tokens(state.request)
                    state.drafted_tokens = min(state.drafted_tokens, start)
                for table in tables_of(state, block_state):
                    self._undrafted.add(table, start, stop)
        for state in states:
            if state.request_id in admitted:
                self._find_undrafted(state, tables_of(state, block_state))

    def _find_undrafted(self, state: RequestState, tables: Tables) -> None:
        """Notes what a request that vLLM admits has of blocks without draft KV."""
        before = self._undrafted.tokens_before(tables[0]) if tables else None
        state.drafted_tokens = ALL_TOKENS if before is None else before

    def _follow_tables(self, output: Any) -> None:
        """Keeps separate block tables, for releases that do not expose theirs."""
        for new in output.scheduled_new_reqs:
            if state := self._states.get(new.req_id):
                state.table = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = self._states.get(request_id)
            if state is None or ids is None:
                continue
            if request_id in cached.resumed_req_ids:
                state.table = list(ids[0])
            else:
                state.table += ids[0]

    def report(self, report: WorkerReport) -> None:
        if report.step:
            self.policy.compute.ended(report.step)
        self.policy.copies.report(report.copied)
        for rank, reason in report.away.items():
            self._note_away(rank, reason)
        if self.saves is not None:
            self.saves.report(report.saves)
        for load in self.loads.report(report.loads):
            if not load.aborted:  # then its claim has ended already
                self._unclaim(load)
            self.chunked.ended(load)
            if (outcome := report.loads.get(load.id)) and outcome.first_failed is not None:
                log.log(
                    logging.DEBUG if outcome.cut else logging.WARNING,
                    "pegaflow: %d of %d blocks were not loaded and are computed request=%s "
                    "error=%s",
                    outcome.failed or load.count,
                    load.count,
                    load.request_id,
                    outcome.detail or outcome.error,
                )

    def _note_away(self, rank: int, reason: str) -> None:
        """A rank cannot use the cache, or can again: loads and saves need all of them.

        The server's view may differ: under an instance's name it may have another engine's ranks.
        """
        if not reason and self._serving != (served := self._serving | {rank}):
            self._serving = served
            if len(served) == self.ranks:
                log.info("pegaflow: all ranks use the cache: %s", self._name)
        if reason and not self._away:
            log.warning(
                "pegaflow: the cache is unavailable, rank %d cannot use it: %s", rank, reason
            )
        if reason:
            self._away[rank] = reason
        elif self._away.pop(rank, "") and not self._away:
            log.info("pegaflow: all ranks use the cache again")

    def keep_stepping(self) -> bool:
        if self.events is not None and self.events.keep_stepping():
            return True
        return self.saves is not None and self.saves.keep_stepping()

    def frees_soon(self) -> bool:
        """Whether vLLM gets blocks by waiting for a save, without preempting a request."""
        return self.saves is not None and self.saves.frees_soon()

    def take_events(self) -> Sequence[Any]:
        """The changes of the cache since the last step, for vLLM's event consumers."""
        return self.events.take() if self.events is not None else ()

    def _watch_link(self) -> None:
        now = self._clock()
        if now - self._link_seen_at < LINK_INTERVAL_S:
            return
        self._link_seen_at = now
        link = self._session.status()
        if link["state"] != self._link["state"]:
            why = f": {link['detail']}" if link["detail"] else ""
            log.info("pegaflow: the link is %s%s", link["state"], why)
        if link["state"] == "ready" and link["server"] != self._server:
            if self._server is not None:
                # A restarted server has none of the blocks that were saved before.
                for state in self._states.values():
                    state.progress.forget()
            self._server = link["server"]
        self._link = link
        if line := self._summary.line(now, link["state"]):
            log.info(line)

    # ---- the cache as a whole

    def reset_cache(self, local: bool = False, keeps_weights: bool = False) -> bool:
        """Stops offering blocks that were saved before: anywhere, or only in this engine if
        ``local``. With ``keeps_weights`` only vLLM's own cache is empty, and all are offered.

        True also without a server, since False would make vLLM's pause and sleep fail: until a
        server has confirmed the reset, nothing is offered.
        """
        self.counts.add("resets", 1, "local" if local else "explicit")
        # vLLM empties its own cache first, which it cannot while blocks are referenced: after a
        # successful reset no save or load is in flight. A failed one is tried again.
        if local or self.saves is None or self.saves.blocks.all_free():
            self._view.emptied()
        if local and keeps_weights:
            self._forget(False, "vLLM sleeps")
            log.info("pegaflow: vLLM has emptied its cache to sleep and keeps its weights")
            return True
        if local:
            # Weights may be replaced while vLLM is paused, in undetectable ways.
            self._forget(self._view.leave(), "vLLM has emptied its cache to pause or to sleep")
            return True
        self._forget(self._view.reset(), "the cache was reset")
        self._resets.begin()
        if self.events is not None:
            self.events.paused = self._resets.is_owed
        return True

    def weights_may_change(self, call: str) -> None:
        """The workers receive a call that may replace their weights."""
        if self._view.leave():
            self._forget(True, f"{call} may change the weights")

    def set_weight_version(self, version: str) -> None:
        if self._view.set_version(version):
            self._forget(True, f"the weights have version {version!r}")

    def _forget(self, viewed_anew: bool, why: str) -> None:
        """Live requests no longer save or load the blocks that they have computed so far."""
        if viewed_anew:
            log.info("pegaflow: %s: from now on this engine uses %s", why, self._view)
        self._generation += 1
        if self.saves is not None:
            self.saves.drop_unsent("reset")
        self.chunked.discard_all()
        self.loads.discard_all()
        for state in self._states.values():
            state.offer_dropped = state.offer_dropped or state.claim is not None
            self._lookups.drop(state)
            self._waits.drop(state)
        if self.events is not None:
            self.events.reset()

    def _reset_done(self) -> bool:
        done = self._resets.is_done()
        if self.events is not None:
            self.events.paused = not done
        return done

    def take_counts(self) -> Counts | None:
        self._show("serving", int(not self._away), "scheduler")
        self._show("private_view", int(self._view.is_private))
        if self.saves is not None:
            self._show("pinned_blocks", self.saves.pinned)
        if self._shown.get("link") != self._link["state"]:
            self._shown["link"] = self._link["state"]
            self.counts.set_link_state("scheduler", self._link["state"])
        counts = self.counts.take()
        self._summary.note(counts)
        return counts

    def _show(self, name: str, value: float, *labels: str) -> None:
        if self._shown.get(name) != value:
            self._shown[name] = value
            self.counts.set(name, value, *labels)

    def close(self) -> None:
        """Ends all claims."""
        self._adapters.close()
        self._session.close()
