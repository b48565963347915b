"""The loop that serves all callers: they submit requests, one of their threads runs the steps, each has an inbox."""

import weakref
from collections.abc import Iterable

from nanovllm.config import Config
from nanovllm.distributed.worker import Workers
from nanovllm.engine.beam_search import BeamRequest
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.leadership import Leadership
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.outputs import StepOutput
from nanovllm.engine.request import Inbox, OutputKind, Request
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_result import PendingStep, StepResult
from nanovllm.utils.context import clear_context
from nanovllm.utils.interrupts import interrupts_held
from nanovllm.utils.stopwatch import Stopwatch


class EngineCore:
    """Scheduler, model runner and ranks, and the requests that have not ended. Any thread may call what is public."""

    def __init__(self, config: Config, startup: Stopwatch):
        """RuntimeError where one of several ranks does not come to its start."""
        self.config = config
        self.model_runner: ModelRunner | None = None
        self.workers = Workers(config)
        weakref.finalize(self, self.workers.exit)
        try:
            tp = self.workers.connect()
            startup.lap("ranks")
            self.model_runner = ModelRunner(config, startup, tp)
            self.workers.wait_until_started()
        except BaseException as error:
            self.close_after(error)
            raise
        block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching)
        bounds = config.max_num_seqs, config.max_num_batched_tokens
        self.scheduler = Scheduler(block_manager, *bounds, config.model_config.eos_token_ids)
        self.requests: dict[int, Request | BeamRequest] = {}  # that have not ended
        self.inboxes: set[Inbox] = set()  # of those requests
        self.leadership = Leadership(self._recover)
        self._in_flight: tuple[ScheduledStep, PendingStep] | None = None

    def submit(self, requests: list[Request | BeamRequest]) -> None:
        """Have them computed; what comes of them goes to their inboxes."""
        with interrupts_held():
            with self.leadership.lock:
                self.check_open()
                for request in requests:
                    self.requests[request.request_id] = request
                    request.inbox.live.add(request.request_id)
                    self.inboxes.add(request.inbox)
            self.leadership.post(lambda: self._enqueue(requests))

    def _enqueue(self, requests: list[Request | BeamRequest]) -> None:
        for request in requests:
            if request.request_id in self.requests and request.request_id not in self.scheduler.live:
                self.scheduler.add(*request.group)

    def withdraw(self, requests: list[Request | BeamRequest]) -> None:
        """Abort requests whose caller has stopped waiting."""
        with interrupts_held():
            if live := [request.request_id for request in requests if request.request_id in self.requests]:
                self.leadership.post(lambda: [self._abort(request_id) for request_id in live])

    def next_output(self, inboxes: list[Inbox]) -> StepOutput:
        """The outputs that have arrived in these inboxes. If there are none, run a step, or wait for the leader."""
        self.check_open()
        if not any(inbox.is_ready for inbox in inboxes):
            self.leadership.lead(self._step, inboxes)
        return StepOutput.merged([output for inbox in inboxes for output in inbox.take()])

    def abort(self, request_id: int) -> None:
        """End a request, if it has not ended; what there is of its answer goes to its inbox."""
        self.leadership.post(lambda: self._abort(request_id))

    def forget_prefixes(self) -> bool:
        """Empty the prefix cache; False, and nothing is done, while there are requests."""
        done: list[bool] = []

        def forget() -> None:
            if self.scheduler.is_finished():
                self.scheduler.block_manager.forget_prefixes()
                done.append(True)

        self.check_open()
        self.leadership.lead(forget, inboxes=())
        return bool(done)

    def check_open(self) -> None:
        """RuntimeError where there is no engine any more, or none in this process."""
        if self.model_runner is None:
            raise RuntimeError("this engine was closed by exit()")
        self.workers.check()

    def exit(self) -> None:
        """Drop what is unfinished and free the device's memory; other callers get a RuntimeError.

        From a signal handler in the middle of a step of the same thread, this is done when the step is over.
        """
        with interrupts_held():
            if self.leadership.is_nested():
                self.leadership.post(self._exit)
            else:
                self.leadership.lead(self._exit, inboxes=(), is_urgent=True)

    # -- what only the leader does -------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Queue the next step, take in what has been computed, and tell the callers. Ctrl-C comes while the device works."""
        with interrupts_held():
            self.check_open()
            self.leadership.take_commands()
            scheduled = self.scheduler.schedule()
        launched = (scheduled, self.workers.launch(self.model_runner, scheduled)) if scheduled else None
        if self.config.async_scheduling:
            launched, self._in_flight = self._in_flight, launched
        if launched:
            sampled = launched[1].wait()
            with interrupts_held():
                self._take_in(launched[0], sampled)

    def _take_in(self, step: ScheduledStep, sampled: StepResult) -> None:
        live = [seq for seq in step.sampled_seqs if seq.finish_reason is None]
        self.scheduler.postprocess(step, *sampled)
        inboxes, touched = [*self.inboxes], {}
        for seq in live:
            request = self.requests[seq.request_id]
            if not request.is_quiet:
                may_hold_stop = seq.finish_reason != "stop" or seq.params.include_stop_str_in_output
                if may_hold_stop and (stop := request.cut_at_stop(seq)) is not None:
                    self.scheduler.finish(seq, "stop", stop)
                request.tell(seq)
            if seq.finish_reason is not None or seq.pauses:
                touched[seq.request_id] = request
        for request in touched.values():
            if isinstance(request, BeamRequest):
                request.advance(self.scheduler)
            if request.is_finished:
                self._end(request)
        for inbox in inboxes:
            inbox.end_step(*((step.num_tokens, 0) if step.is_prefill else (0, len(live))))

    def _abort(self, request_id: int) -> None:
        if (request := self.requests.get(request_id)) is not None:
            for seq in self.scheduler.abort(request_id):
                if not request.is_quiet:
                    request.tell(seq)
            self._end(request)
            request.inbox.end_step()

    def _end(self, request: Request | BeamRequest) -> None:
        """Its last sequence has ended."""
        inbox = request.inbox
        if inbox.wants is not OutputKind.EVENTS:
            inbox.finished.append(request.output())
        with self.leadership.lock:
            del self.requests[request.request_id]
            inbox.ended.add(request.request_id)
            if inbox.live <= inbox.ended:
                self.inboxes.discard(inbox)

    # -- errors and ends -----------------------------------------------------------------------------------------------

    def _recover(self, error: BaseException, inboxes: Iterable[Inbox]) -> None:
        """Trust nothing of the state that an error left. Ctrl-C costs other callers time; an error ends all requests."""
        clear_context()
        if self.model_runner is None:
            return
        if not isinstance(error, Exception):
            self._restart()
            for request in [*self.requests.values()]:
                if request.is_finished:  # with the step that was cut short
                    for seq in () if request.is_quiet else request.group:
                        request.tell(seq)
                    self._end(request)
                    request.inbox.end_step()
            return
        self._drop_everything(error)
        for inbox in inboxes:
            inbox.drop(None)  # to them it is raised as it is
        if self.workers.processes:
            self.close_after(error)

    def _restart(self) -> None:
        """Compute again whatever has not ended."""
        self.model_runner.recover()  # what was queued still reads the host's buffers
        self._in_flight = None
        self.scheduler.reset()
        with self.leadership.lock:
            for inbox in self.inboxes:
                inbox.live = {i for i in inbox.live if i in self.requests}
            self.inboxes = {request.inbox for request in self.requests.values()}
        self._enqueue([request for request in self.requests.values() if not request.is_finished])

    def _drop_everything(self, error: BaseException | None) -> None:
        with self.leadership.lock:
            self.requests.clear()
            self.leadership.forget_commands()
            for inbox in self.inboxes:
                inbox.drop(error)
            self.inboxes.clear()
        self.scheduler.live.clear()
        self._restart()

    def close_after(self, error: BaseException) -> None:
        """Close the engine. If the failure of another rank caused `error`, raise that instead."""
        cause, has_runner = self.workers.give_up(error), self.model_runner is not None
        self._close()
        if not has_runner:  # it would have done this
            self.workers.tp.close()
        if cause is not error:
            raise cause from error

    def _close(self) -> None:
        self.workers.exit()
        if self.model_runner is not None:
            self.model_runner.exit()
            self.model_runner = None

    def _exit(self) -> None:
        if self.model_runner is not None:
            self._drop_everything(None)
        self._close()
