"""Requests in, text out: the facade over scheduler and model runner, for any number of callers at a time."""

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from nanovllm.config import Config
from nanovllm.engine.engine_core import EngineCore
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.outputs import RequestOutput, StepOutput, StreamEvent, progress_bar
from nanovllm.engine.processor import InputProcessor
from nanovllm.engine.prompts import Prompt
from nanovllm.engine.request import Inbox, OutputKind, Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int
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
        with ThreadPoolExecutor(1) as pool:  # transformers takes seconds to import, and others work meanwhile
            tokenizer = pool.submit(load_tokenizer, self.config.tokenizer)
            self.core = EngineCore(self.config, startup)
            try:
                self.tokenizer = tokenizer.result()
                self.processor = InputProcessor(self.config, self.tokenizer)
            except BaseException as error:
                self.core.close_after(error)
                raise
        startup.lap("tokenizer")  # what was still to wait for
        self.startup_seconds = startup.seconds
        self.workers, self.scheduler = self.core.workers, self.core.scheduler
        self.scheduler.eos_token_id = self.tokenizer.eos_token_id
        self._loop = threading.local()  # the inbox of each thread that calls `add_request`
        self._loops: set[Inbox] = set()  # all of those
        logger.info("%r", self)

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in their order.

        A prompt is a string, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a conversation;
        `sampling_params` one for all, or one for each; None is what the model recommends.

        Nothing is queued unless every prompt is good: ValueError or TypeError else, as of `add_request`. Ctrl-C and
        errors drop this call's requests and leave the engine ready for the next. RuntimeError where a step that another
        caller ran has failed, as that drops all requests.
        """
        inbox = Inbox(OutputKind.ANSWERS)
        return self._answers(self.processor.requests(prompts, sampling_params, inbox), inbox, use_tqdm)

    def _answers(self, requests: list, inbox: Inbox, use_tqdm: bool) -> list:
        answers = {}
        try:
            self.core.submit(requests)
            with progress_bar(len(requests), disable=not use_tqdm) as show:
                while len(answers) < len(requests):
                    output = self.core.next_output([inbox])
                    show(output)
                    answers |= {answer.request_id: answer for answer in output.finished}
        except BaseException:
            self.core.withdraw(requests)
            raise
        return [answers[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        chat_template_kwargs: Mapping | None = None,
    ) -> Iterator[StreamEvent]:
        """The answers of `generate` piece by piece, as they come from many requests at once.

        Text that may yet be cut off as a stop string is held back, and no character is split. `chat_template_kwargs` are
        for conversations. Errors are those of `generate`, and come with the call; leaving the loop aborts what is left.
        """
        self.core.check_open()
        inbox = Inbox(OutputKind.EVENTS)
        return self._stream(self.processor.requests(prompts, sampling_params, inbox, chat_template_kwargs), inbox)

    def _stream(self, requests: list[Request], inbox: Inbox) -> Iterator[StreamEvent]:
        num_left = sum(len(request.group) for request in requests)
        try:
            self.core.submit(requests)
            while num_left:
                for event in self.core.next_output([inbox]).events:
                    num_left -= event.finish_reason is not None
                    yield event
        finally:
            self.core.withdraw(requests)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a request, and return its id; `step` of the same thread brings its answer.

        Raises before anything is queued: ValueError for an empty prompt, one that is not shorter than
        `max_model_len`, or a token id outside the vocabulary; TypeError for something else than text or ids.
        """
        self.core.check_open()
        request = self.processor.request(prompt, sampling_params, self._loop_inbox())
        self.core.submit([request])
        return request.request_id

    def abort(self, request_id: int) -> None:
        """End a request, whose blocks are free for the next step; its caller gets what there is of its answer.

        One that has ended already stays as it is. May be called from a signal handler. ValueError for an id that no
        request ever had.
        """
        if not self.processor.num_requests:
            raise ValueError(f"request_id={request_id!r}: there has been no request yet")
        request_id = check_int("request_id", request_id, low=0, high=self.processor.num_requests - 1)
        self.core.abort(request_id)

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
        return self.core.next_output(inboxes)

    def is_finished(self) -> bool:
        """Whether nothing is left to do, or to tell, for those requests of `add_request` whose answers `step` brings."""
        return not any(inbox.live or inbox.is_ready for inbox in self._inboxes_to_read())

    @property
    def model_runner(self) -> ModelRunner | None:
        """Of rank 0; None once the engine was closed."""
        return self.core.model_runner

    def exit(self) -> None:
        """Drop what is unfinished and free the device's memory; an engine that was left can't be used again."""
        self.core.exit()

    def stats(self) -> dict:
        """What goes on, and what went on since the start.

        `requests` waiting and running, with n > 1 each answer for itself; `blocks` used, cached (free, and to be found as
        a prefix) and free; `prefix_hit_rate`, of the prompts' tokens; `preemptions`; `tokens` in and out; `steps` by kind.
        """
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing is done, while requests hold blocks."""
        return self.core.forget_prefixes()

    def _loop_inbox(self) -> Inbox:
        """That of the requests which this thread adds."""
        if getattr(self._loop, "inbox", None) is None:
            self._loop.inbox = Inbox(OutputKind.TOKENS)
            with self.core.leadership.lock:
                kept = {inbox for inbox in self._loops if inbox.live or inbox.is_ready or inbox.thread.is_alive()}
                self._loops = kept | {self._loop.inbox}
        return self._loop.inbox

    def _inboxes_to_read(self) -> list[Inbox]:
        """Those whose outputs `step` brings to this thread."""
        own = getattr(self._loop, "inbox", None)
        return [own] if own is not None else [x for x in self._loops if not (x.is_read and x.thread.is_alive())]

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
