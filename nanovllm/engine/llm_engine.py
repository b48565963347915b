"""Requests in, text out: the facade over scheduler and model runner, for any number of callers at a time."""
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from nanovllm.config import Config
from nanovllm.engine.beam_search import BeamRequest
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.leadership import Leadership
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.outputs import ProgressBar, RequestOutput, StepOutput, StreamEvent
from nanovllm.engine.processor import InputProcessor
from nanovllm.engine.prompts import Prompt
from nanovllm.engine.request import Inbox, Request, Wants
from nanovllm.engine.sampled import Sampled, SampledTokens
from nanovllm.engine.scheduler import ScheduledStep, Scheduler
from nanovllm.engine.worker import Workers
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int
from nanovllm.utils.context import clear_context
from nanovllm.utils.interrupts import interrupts_held
from nanovllm.utils.stopwatch import Stopwatch
from nanovllm.utils.tokenizer import load_tokenizer

logger = logging.getLogger("nanovllm")


class LLMEngine:
    """Generates for many requests at once.

    `generate` does it all and `stream` shows it as it comes; `add_request`, `step`, `abort` and `is_finished` are the
    loop for those who want to hold it. All may be called from several threads at the same time, and each caller gets
    what it asked for: there is no thread of the engine's own, one of the callers runs the next step, and the others
    wait for what it brings them. What a caller adds or aborts takes effect between two steps.

    With `async_scheduling` a step's tokens reach the host one turn late, while the next step runs. An engine is a
    context manager, and `exit` frees its memory. `startup_seconds` says where the time of its start went.
    """

    def __init__(self, model: str, **settings):
        """`settings` are the fields of `nanovllm.config.Config`, which states their defaults and errors.

        With several ranks, RuntimeError where one does not come to its start.
        """
        startup = Stopwatch()
        self.config = Config.create(model, settings)
        startup.lap("settings")
        self.model_runner: ModelRunner | None = None
        self.workers = Workers(self.config)
        weakref.finalize(self, self.workers.exit)
        with ThreadPoolExecutor(1) as pool:  # transformers takes seconds to import, and others work meanwhile
            tokenizer = pool.submit(load_tokenizer, self.config.tokenizer)
            try:
                tp = self.workers.connect()
                startup.lap("ranks")
                self.model_runner = ModelRunner(self.config, startup, tp)
                self.workers.wait_until_started()
                self.tokenizer = tokenizer.result()
                self.processor = InputProcessor(self.config, self.tokenizer)
            except BaseException as error:
                self._close_after(error)
                raise
        startup.lap("tokenizer")  # what was still to wait for
        self.startup_seconds = startup.seconds
        block_manager = BlockManager(
            self.config.num_kvcache_blocks, self.config.kvcache_block_size, self.config.enable_prefix_caching
        )
        bounds = self.config.max_num_seqs, self.config.max_num_batched_tokens
        eos = self.config.model_config.eos_token_ids, self.tokenizer.eos_token_id
        self.scheduler = Scheduler(block_manager, *bounds, *eos)
        self._in_flight: tuple[ScheduledStep, SampledTokens] | None = None
        self._requests: dict[int, Request | BeamRequest] = {}  # that have not ended
        self._inboxes: set[Inbox] = set()  # of those requests
        self._leadership = Leadership(self._recover)
        self._loop = threading.local()  # the inbox of each thread that calls `add_request`
        self._loops: set[Inbox] = set()  # all of those
        logger.info("%r", self)

    def generate(
        self, prompts: Prompt | list[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answers to one prompt or many, in their order.

        A prompt is a string, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a conversation;
        `sampling_params` one for all, or one for each; None is what the model recommends.

        Nothing is queued unless every prompt is good: ValueError or TypeError else, as of `add_request`. Ctrl-C and
        errors drop this call's requests and leave the engine ready for the next. RuntimeError where a step that another
        caller ran has failed, as that drops all requests.
        """
        inbox = Inbox(Wants.ANSWERS)
        return self._answers(self.processor.requests(prompts, sampling_params, inbox), inbox, use_tqdm)

    def _answers(self, requests: list, inbox: Inbox, use_tqdm: bool) -> list:
        answers = {}
        try:
            self._submit(requests)
            with ProgressBar(len(requests), disable=not use_tqdm) as bar:
                while len(answers) < len(requests):
                    output = self._next_output([inbox])
                    bar.show(output)
                    answers |= {answer.request_id: answer for answer in output.finished}
        except BaseException:
            self._withdraw(requests)
            raise
        return [answers[request.request_id] for request in requests]

    def stream(
        self, prompts: Prompt | list[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None = None,
        chat_template_kwargs: Mapping | None = None,
    ) -> Iterator[StreamEvent]:  # fmt: skip
        """The answers of `generate` piece by piece, as they come from many requests at once.

        Text that may yet be cut off as a stop string is held back, and no character is split. `chat_template_kwargs` are
        for conversations. Errors are those of `generate`, and come with the call; leaving the loop aborts what is left.
        """
        self._check_open()
        inbox = Inbox(Wants.EVENTS)
        return self._stream(self.processor.requests(prompts, sampling_params, inbox, chat_template_kwargs), inbox)

    def _stream(self, requests: list[Request], inbox: Inbox) -> Iterator[StreamEvent]:
        num_left = sum(len(request.group) for request in requests)
        try:
            self._submit(requests)
            while num_left:
                for event in self._next_output([inbox]).events:
                    num_left -= event.finish_reason is not None
                    yield event
        finally:
            self._withdraw(requests)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a request, and return its id; `step` of the same thread brings its answer.

        Raises before anything is queued: ValueError for an empty prompt, one that is not shorter than
        `max_model_len`, or a token id outside the vocabulary; TypeError for something else than text or ids.
        """
        self._check_open()
        request = self.processor.request(prompt, sampling_params, self._loop_inbox())
        self._submit([request])
        return request.request_id

    def abort(self, request_id: int) -> None:
        """End a request, whose blocks are free for the next step; its caller gets what there is of its answer.

        One that has ended already stays as it is. May be called from a signal handler. ValueError for an id that no
        request ever had.
        """
        if not self.processor.num_requests:
            raise ValueError(f"request_id={request_id!r}: there has been no request yet")
        request_id = check_int("request_id", request_id, low=0, high=self.processor.num_requests - 1)
        self._leadership.post(lambda: self._abort(request_id))

    def step(self) -> StepOutput:
        """One turn of the loop: queue the next step, and take in what has been computed.

        It brings what has come for the requests that this thread has added. A thread that has added none, the loop of a
        server, gets that of all threads which do not call `step` themselves.

        If it raises an error, every request is dropped; the engine can go on with new ones. After Ctrl-C all go on. With
        several ranks any other error closes it, and that of another rank, or its end, is a RuntimeError that says which.
        """
        inboxes = self._inboxes_to_read()
        for inbox in inboxes:
            inbox.is_read |= inbox.thread is threading.current_thread()
        return self._next_output(inboxes)

    def is_finished(self) -> bool:
        """Whether nothing is left to do, or to tell, for those requests of `add_request` whose answers `step` brings."""
        return not any(inbox.live or inbox.is_ready for inbox in self._inboxes_to_read())

    def stats(self) -> dict:
        """What goes on, and what went on since the start.

        `requests` waiting and running, with n > 1 each answer for itself; `blocks` used, cached (free, and to be found as
        a prefix) and free; `prefix_hit_rate`, of the prompts' tokens; `preemptions`; `tokens` in and out; `steps` by kind.
        """
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing is done, while requests hold blocks."""
        return self._leadership.lead(self.scheduler.forget_prefixes) and not self.scheduler.live

    # -- between callers and the leader --------------------------------------------------------------------------------

    def _submit(self, requests: list[Request | BeamRequest]) -> None:
        with self._leadership.lock:
            self._check_open()
            for request in requests:
                self._requests[request.request_id] = request
                request.inbox.live.add(request.request_id)
                self._inboxes.add(request.inbox)
        self._leadership.post(lambda: [self.scheduler.add(*r.group) for r in requests if r.request_id in self._requests])

    def _withdraw(self, requests: list[Request | BeamRequest]) -> None:
        """Their caller does not wait for them any more."""
        with interrupts_held():
            if live := [request.request_id for request in requests if request.request_id in self._requests]:
                self._leadership.post(lambda: [self._abort(request_id) for request_id in live])

    def _next_output(self, inboxes: list[Inbox]) -> StepOutput:
        """What has come; if nothing has, run a step, or wait for the thread that does."""
        self._check_open()
        if not any(inbox.is_ready for inbox in inboxes):
            self._leadership.lead(self._step, inboxes)
        return StepOutput.merged([output for inbox in inboxes for output in inbox.take()])

    def _loop_inbox(self) -> Inbox:
        """That of the requests which this thread adds."""
        if getattr(self._loop, "inbox", None) is None:
            self._loop.inbox = Inbox(Wants.TOKENS)
            with self._leadership.lock:
                kept = {inbox for inbox in self._loops if inbox.live or inbox.is_ready or inbox.thread.is_alive()}
                self._loops = kept | {self._loop.inbox}
        return self._loop.inbox

    def _inboxes_to_read(self) -> list[Inbox]:
        """Those whose outputs `step` brings to this thread."""
        own = getattr(self._loop, "inbox", None)
        return [own] if own is not None else [inbox for inbox in self._loops if not inbox.is_read]

    # -- what only the leader does -------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Queue the next step, take in what has been computed, and tell the callers. Ctrl-C comes while the device works."""
        with interrupts_held():
            self._check_open()
            self._leadership.take_commands()
            scheduled = self.scheduler.schedule()
        launched = (scheduled, self.workers.launch(self.model_runner, scheduled)) if scheduled else None
        if self.config.async_scheduling:
            launched, self._in_flight = self._in_flight, launched
        if launched:
            sampled = launched[1].wait()
            with interrupts_held():
                self._take_in(launched[0], sampled)

    def _take_in(self, step: ScheduledStep, sampled: Sampled) -> None:
        live = [seq for seq in step.sampled if seq.finish_reason is None]
        self.scheduler.postprocess(step, *sampled)
        inboxes, touched = [*self._inboxes], {}
        for seq in live:
            request = self._requests[seq.request_id]
            if not request.is_quiet:
                has_text = seq.finish_reason != "stop" or seq.params.include_stop_str_in_output
                if has_text and (stop := request.cut_at_stop(seq)) is not None:
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
        if (request := self._requests.get(request_id)) is not None:
            for seq in self.scheduler.abort(request_id):
                if not request.is_quiet:
                    request.tell(seq)
            self._end(request)
            request.inbox.end_step()

    def _end(self, request: Request | BeamRequest) -> None:
        """Its last sequence has ended."""
        with self._leadership.lock:
            del self._requests[request.request_id]
            request.inbox.live.discard(request.request_id)
            if not request.inbox.live:
                self._inboxes.discard(request.inbox)
        if request.inbox.wants is not Wants.EVENTS:
            request.inbox.finished.append(request.output())

    # -- errors and ends -----------------------------------------------------------------------------------------------

    def _recover(self, error: BaseException, inboxes: Iterable[Inbox]) -> None:
        """Trust nothing of the state that an error left. Ctrl-C costs other callers time; an error ends all requests."""
        clear_context()
        if self.model_runner is None:
            return
        if not isinstance(error, Exception):
            self._restart()
            for request in [*self._requests.values()]:
                if request.is_finished:  # with the step that was cut short
                    self._end(request)
                    request.inbox.end_step()
            return
        self._drop_everything(error)
        for inbox in inboxes:
            inbox.drop(None)  # to them it is raised as it is
        if self.workers.processes:
            self._close_after(error)

    def _restart(self) -> None:
        """Compute again whatever has not ended."""
        self.model_runner.recover()  # what was queued still reads the host's buffers
        self._in_flight = None
        self.scheduler.reset()

    def _drop_everything(self, error: BaseException | None) -> None:
        with self._leadership.lock:
            self._requests.clear()
            self._leadership.forget_commands()
            for inbox in self._inboxes:
                inbox.drop(error)
            self._inboxes.clear()
        self.scheduler.live.clear()
        self._restart()

    def _close_after(self, error: BaseException) -> None:
        """Close the engine; raises the cause of `error` where that is another."""
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

    def exit(self) -> None:
        """Drop what is unfinished and free the device's memory; an engine that was left can't be used again."""
        with interrupts_held():
            self._leadership.lead(self._exit, inboxes=(), is_urgent=True)

    def _exit(self) -> None:
        if self.model_runner is not None:
            self._drop_everything(None)
        self._close()

    def _check_open(self) -> None:
        if self.model_runner is None:
            raise RuntimeError("this engine was closed by exit()")
        self.workers.check()

    def __repr__(self) -> str:
        config = self.config
        num_tokens = config.num_kvcache_blocks * config.kvcache_block_size
        return (
            f"LLM({config.model!r}: {config.device}, {str(config.dtype).removeprefix('torch.')}, attention by "
            f"{config.attention_backend}, max_model_len {config.max_model_len:,}, {config.num_kvcache_blocks:,} blocks for "
            f"{num_tokens:,} tokens, prefix caching {'on' if config.enable_prefix_caching else 'off'}, "
            f"{config.tensor_parallel_size} rank{'s' * (config.tensor_parallel_size > 1)})"
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.exit()
