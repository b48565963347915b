"""The loop behind all callers: they submit requests, one of their threads runs the steps, and each has an inbox."""

import weakref
from collections.abc import Callable, Collection, Iterable

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.inbox import Inbox, OutputKind
from nanovllm.engine.leadership import Leadership
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.outputs import StepOutput
from nanovllm.engine.request import Request
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_policy import make_policy
from nanovllm.engine.single_rank import SingleRank
from nanovllm.engine.step_result import PendingStep, StepResult
from nanovllm.engine.token_budget import TokenBudget
from nanovllm.utils.context import clear_context
from nanovllm.utils.interrupts import interrupts_held
from nanovllm.utils.stopwatch import Stopwatch


class EngineCore:
    """Scheduler, model runner, ranks, and the requests that have not ended. Any thread may call its public methods."""

    def __init__(self, config: Config, startup: Stopwatch):
        """RuntimeError if one of several ranks does not start."""
        self.config = config
        self.policy = make_policy(config.scheduling_policy)
        self.model_runner: ModelRunner | None = None
        self.workers = _make_workers(config)
        weakref.finalize(self, self.workers.exit)
        try:
            tp = self.workers.connect()
            startup.lap("ranks")
            self.model_runner = ModelRunner(config, startup, tp)
            self.workers.wait_until_started()
        except BaseException as error:
            self.close_after(error)
            raise
        assert config.num_kvcache_blocks and config.max_num_mixed_tokens, "the model runner has set them"
        block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching)
        mixed = TokenBudget(config.max_num_mixed_tokens, config.model_config.context_of_equal_cost)
        budget = TokenBudget(config.max_num_batched_tokens)
        eos_token_ids = config.model_config.eos_token_ids
        self.scheduler = Scheduler(block_manager, config.max_num_seqs, budget, mixed, eos_token_ids)
        self.requests: dict[int, Request] = {}  # by id, those that have not ended
        self.inboxes: set[Inbox] = set()  # of those requests
        self.leadership = Leadership(self._recover)
        # for viewers: the leader calls each after a step whose result it has processed; an error is one of that step
        self.on_step: list[Callable[[ScheduledStep, StepResult], None]] = []
        self._in_flight: tuple[ScheduledStep, PendingStep] | None = None

    def submit(self, requests: Collection[Request]) -> None:
        """Queue requests; their outputs go to their inboxes."""
        with interrupts_held():
            with self.leadership.lock:
                self.check_open()
                for request in requests:
                    self.requests[request.request_id] = request
                    request.inbox.live.add(request.request_id)
                    self.inboxes.add(request.inbox)
            self.leadership.post(lambda: self._enqueue(requests))

    def abort(self, request_id: int) -> None:
        """End a request that has not ended; its inbox gets the tokens that were generated."""
        self.leadership.post(lambda: self._abort(request_id))

    def discard(self, requests: Collection[Request]) -> None:
        """End requests whose caller has stopped waiting: no output is made."""
        with interrupts_held():
            if live := [request.request_id for request in requests if request.request_id in self.requests]:
                self.leadership.post(lambda: self._discard(live))

    def next_output(self, inboxes: list[Inbox]) -> StepOutput:
        """What has arrived in these inboxes. If that is nothing, run a step, or wait for another thread's step."""
        self.check_open()
        if not any(inbox.is_ready for inbox in inboxes):
            self.leadership.run_or_wait(self._step, inboxes)
        outputs = [inbox.take() for inbox in inboxes] or [StepOutput()]
        for other in outputs[1:]:
            outputs[0].add(other)
        return outputs[0]

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing is done, while there are requests."""
        done: list[bool] = []

        def reset() -> None:
            if self.scheduler.is_finished():
                self.scheduler.block_manager.clear_prefix_cache()
                done.append(True)

        self.check_open()
        self.leadership.run(reset)
        return bool(done)

    def check_open(self) -> None:
        """RuntimeError if the engine was closed, has failed, or belongs to another process."""
        if self.model_runner is None:
            raise RuntimeError("this engine was closed by exit()")
        self.workers.check()

    def exit(self) -> None:
        """Drop unfinished requests and free the device's memory; callers that wait get a RuntimeError.

        In a signal handler that interrupts a step of its own thread, this takes effect when the step is over.
        """
        with interrupts_held():
            if self.leadership.is_nested():
                self.leadership.post(self._exit)
            else:
                self.leadership.run(self._exit, is_urgent=True)

    # -- what only the leader does -------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Launch the next step, and process the result of this one or, with `async_scheduling`, of the one before.

        Ctrl-C is held except while the device works.
        """
        with interrupts_held():
            self.check_open()
            self.leadership.run_commands()
            step = self.scheduler.schedule(prompts_first=self._is_offline())
        launched = (step, self.workers.launch(self.model_runner, step)) if step else None
        if self.config.async_scheduling:
            launched, self._in_flight = self._in_flight, launched
        if launched:
            step, pending = launched
            result = pending.wait()
            with interrupts_held():
                self._process_result(step, result)
                for hook in [*self.on_step]:
                    hook(step, result)

    def _is_offline(self) -> bool:
        """Whether a single call waits for all answers at once, so that no one sees when a token arrives."""
        inboxes = [*self.inboxes]
        return len(inboxes) == 1 and inboxes[0].kind is OutputKind.FINAL

    def _process_result(self, step: ScheduledStep, result: StepResult) -> None:
        live = [seq for seq in step.sampled_seqs if seq.finish_reason is None]
        num_decoded = sum(seq.finish_reason is None for seq in step.sampled_seqs[: step.num_decodes])
        inboxes = [*self.inboxes]
        changed: dict[int, Request] = {}
        self.scheduler.postprocess(step, *result)
        if step.constrained:
            # a room of its own, which few requests need
            from nanovllm.structured_outputs.constraint import advance_constraints

            advance_constraints(step.constrained, self.scheduler)
        for seq in live:
            request = self.requests[seq.request_id]
            if not request.only_final:
                request.process_token(seq, self.scheduler)
            if seq.finish_reason is not None or seq.is_beam:
                changed[seq.request_id] = request
        for request in changed.values():
            request.advance(self.scheduler)
            if request.is_finished:
                self._finish(request)
        for inbox in inboxes:
            inbox.publish(sum(end - start for _, start, end in step.chunks), num_decoded)

    def _enqueue(self, requests: Collection[Request]) -> None:
        for request in requests:
            if request.request_id in self.requests and request.request_id not in self.scheduler.live:
                self.scheduler.add(*(seq for seq in request.group if not seq.is_finished))

    def _abort(self, request_id: int, deliver: bool = True) -> None:
        if (request := self.requests.get(request_id)) is not None:
            self.scheduler.abort(request_id)
            if deliver:
                self._finish_now(request)
            else:
                self._forget(request)

    def _discard(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._abort(request_id, deliver=False)

    def _finish(self, request: Request) -> None:
        """Its last sequence has ended."""
        if request.inbox.kind is not OutputKind.EVENTS:
            request.inbox.collected.finished.append(request.output())
        self._forget(request)

    def _finish_now(self, request: Request) -> None:
        """The same outside of a step, with what was not delivered yet."""
        for seq in request.group:
            request.deliver(seq)
        self._finish(request)
        request.inbox.publish()

    def _forget(self, request: Request) -> None:
        inbox = request.inbox
        with self.leadership.lock:
            del self.requests[request.request_id]
            inbox.ended.add(request.request_id)
            if inbox.live <= inbox.ended:
                self.inboxes.discard(inbox)

    # -- errors, and the end of the engine -----------------------------------------------------------------------------

    def _recover(self, error: BaseException, inboxes: Iterable[Inbox]) -> None:
        """Rebuild the state. After an interrupt all requests are computed again; any other error drops them."""
        clear_context()
        if self.model_runner is None:
            return
        if not isinstance(error, Exception):
            self._restart()
            for request in [*self.requests.values()]:
                if request.request_id not in self.scheduler.live:  # ended by the step that was interrupted
                    self._finish_now(request)
            return
        self._drop_requests(error)
        for inbox in inboxes:
            inbox.fail(None)  # their reader gets the error itself
        if self.workers.processes:
            self.close_after(error)

    def _restart(self) -> None:
        """Compute all requests that have not ended again, from the tokens they have."""
        if self.model_runner is not None:
            self.model_runner.recover()  # steps that are queued still read the host's buffers
        self._in_flight = None
        self.scheduler.reset()
        with self.leadership.lock:
            for inbox in self.inboxes:
                inbox.live = {i for i in inbox.live if i in self.requests}
            self.inboxes = {request.inbox for request in self.requests.values()}
        self._enqueue(self.requests.values())

    def _drop_requests(self, error: BaseException | None) -> None:
        with self.leadership.lock:
            self.requests.clear()
            self.leadership.clear_commands()
            for inbox in self.inboxes:
                inbox.fail(error)
            self.inboxes.clear()
        self.scheduler.live.clear()
        self._restart()

    def close_after(self, error: BaseException) -> None:
        """Close the engine. If another rank's failure has caused `error`, raise that instead."""
        cause = self.workers.cause_of(error)
        has_runner = self.model_runner is not None
        self._close()
        if not has_runner:  # whose exit would have done this
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
            self._drop_requests(None)
        self._close()


def _make_workers(config: Config):
    if config.tensor_parallel_size == 1:
        return SingleRank()
    from nanovllm.distributed.worker import Workers  # only here: one rank alone does without processes and channels

    return Workers(config)
