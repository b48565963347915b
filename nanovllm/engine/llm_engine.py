"""Requests in, text out: the public methods of an engine, for any number of callers at a time."""

import logging
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from math import inf
from time import perf_counter
from typing import Any

from nanovllm import rollout
from nanovllm.config import Config, takes_settings_of
from nanovllm.engine.build import build_engine
from nanovllm.engine.engine_thread import EngineThread, Submission
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.outputs import OutputCollector, OutputKind, RequestOutput, StepOutput
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.stats import described, stats_of_engine
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.requests.request import Prompt
from nanovllm.requests.step_callers import StepCallers
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.requests.streams import events_of
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int
from nanovllm.utils.loader import load_tokenizer
from nanovllm.utils.progress import progress_bar

logger = logging.getLogger("nanovllm")
PROGRESS_SECONDS = 0.1  # between two updates of a progress bar


class LLMEngine:
    """Generates for many requests at once.

    `generate` returns complete answers, and `stream` their pieces as they arrive. `add_request`, `step`, `abort` and
    `is_finished` are for callers that run the loop themselves. All methods may be called from several threads at the
    same time, and each caller gets the outputs of its own requests. The engine's own thread runs the steps; requests
    are added and aborted between two of them.

    With `async_scheduling`, the tokens of a step reach the host while the next step runs. An engine is a context
    manager; `exit` frees its memory. `startup_seconds` has the time that each part of the start took.
    """

    @takes_settings_of(Config)
    def __init__(self, model: str, **settings: Any) -> None:
        """`settings` are the fields of `nanovllm.config.Config`, which states their defaults and errors.

        RuntimeError if one of several ranks does not start.
        """
        startup = Stopwatch()
        self.config = Config.create(model, settings)
        startup.lap("settings")
        with ThreadPoolExecutor(1) as pool:  # importing transformers takes seconds; the model is loaded meanwhile
            tokenizer = pool.submit(load_tokenizer, str(self.config.tokenizer))
            self.core = build_engine(self.config, startup.lap)
            try:
                self.tokenizer = tokenizer.result()
                self.input_processor = InputProcessor(self.config, self.tokenizer)
            except BaseException as error:
                self.core.close_after(error)
                raise
        startup.lap("tokenizer")  # the rest of the wait for it
        self.startup_seconds = startup.seconds
        if self.tokenizer.eos_token_id is not None:
            self.config.resolve(eos=self.tokenizer.eos_token_id)
            self.scheduler.eos = self.config.eos
        # the model is loaded by the caller's thread, so that Ctrl-C ends the loading at once
        self.engine_thread = EngineThread(self.core)
        weakref.finalize(self, self.engine_thread.exit)  # before the start: what is started is ended, too
        self.engine_thread.start()
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", repr(self))  # a record that is kept does not keep the engine

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one prompt or many, in the order of the prompts.

        A prompt is a string, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a conversation.
        `sampling_params` are for all prompts, or a list with one for each; None takes what the model recommends.
        `priority` has an integer for each prompt, as in `add_request`.

        ValueError or TypeError, as in `add_request`, if any prompt is invalid; then none is queued. Ctrl-C drops the
        requests of this call. RuntimeError, with the error as its cause, if a step fails, which drops all requests. The
        engine can be used again, but with several ranks an error closes it.
        """
        requests = self.input_processor.requests(prompts, sampling_params, OutputKind.FINAL_ONLY, None, priority)
        return self._run(requests, use_tqdm)

    def _run(self, requests: list[Any], use_tqdm: bool) -> list[Any]:
        """The final outputs of requests, in their order."""
        outputs: dict[int, Any] = {}
        collector = OutputCollector(OutputKind.FINAL_ONLY, max_seconds=PROGRESS_SECONDS if use_tqdm else inf)
        submission = Submission(self.engine_thread, requests, collector)
        bar: Any = nullcontext(lambda num_finished, **num_tokens: None)
        if use_tqdm:
            bar = progress_bar(len(requests), desc="Generating", dynamic_ncols=True)
        with submission, bar as advance:
            while len(outputs) < len(requests):
                output = self.engine_thread.take(collector)
                advance(len(output.finished), prefill=output.num_prefill_tokens, decode=output.num_decode_tokens)
                outputs |= {finished.request_id: finished for finished in output.finished}
        return [outputs[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        chat_template_kwargs: Mapping | None = None,
        priority: list[int] | None = None,
    ) -> Iterator[StreamEvent]:
        """The answers of `generate` piece by piece; the events of different prompts alternate.

        Text that may still be cut off as a stop string is held back, and no character is split. `chat_template_kwargs`
        are for conversations. Errors are those of `generate`; those of prompts are raised by the call itself. Requests
        are queued when the first event is asked for, and leaving the loop drops those that have not ended. The engine
        runs ahead of the reader by 32 steps at most, unless other callers want more.
        """
        self.engine_thread.check_open()
        kind = OutputKind.DELTA
        requests = self.input_processor.requests(prompts, sampling_params, kind, chat_template_kwargs, priority)
        return events_of(requests, self.engine_thread)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None, priority: int = 0) -> int:
        """Queue a request and return its id. `step`, called by the same thread, returns its output.

        With `scheduling_policy="priority"`, the lowest `priority` is served first. It must be 0 with "fcfs".

        Before anything is queued: ValueError for a prompt that is empty or not shorter than `max_model_len`, or a token
        id outside of the vocabulary; TypeError for anything but a prompt; and any error of your own scheduling policy.
        """
        self.engine_thread.check_open()
        request = self.input_processor.request(prompt, sampling_params, OutputKind.TOKENS, priority=priority)
        self.engine_thread.submit([request], self._step_callers.own_collector())
        return request.request_id

    def abort(self, request_id: int) -> None:
        """End a request before the next step; its caller gets the tokens that were generated.

        Nothing happens if it has ended already. May be called from a signal handler. ValueError for an id that no
        request has.
        """
        if not (num_requests := self.input_processor.num_requests):
            raise ValueError(f"request_id={request_id!r}: there has been no request yet")
        self.engine_thread.abort(check_int("request_id", request_id, low=0, high=num_requests - 1))

    def step(self) -> StepOutput:
        """Make a step, unless something has arrived already, and return what has, for the requests of this thread.

        A thread that has added none, such as the loop of a server, gets the outputs of all threads that do not call
        `step` themselves.

        An error drops all requests, and every caller that waits gets a RuntimeError with the error as its cause; then
        the engine can be used again. Ctrl-C drops none. With several ranks, any error closes the engine, and the
        failure of another rank is a RuntimeError that names it.
        """
        return self._step_callers.step()

    def is_finished(self) -> bool:
        """Whether `step` has nothing more to return to this thread."""
        return self._step_callers.is_finished()

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def workers(self) -> Any:
        """The processes of the other ranks: a distributed.worker.Workers, or a SingleRank."""
        return self.core.workers

    @property
    def model_runner(self) -> ModelRunner | None:
        """The ModelRunner of rank 0; None after `exit`, and after an error with several ranks."""
        return self.core.model_runner

    def exit(self) -> None:
        """Drop unfinished requests and free the device's memory; the engine can't be used again."""
        self.engine_thread.exit()
        self.input_processor.close()

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and the current state.

        `requests`: waiting and running, where each of `n` answers counts. `blocks`: used, cached (free, but found as a
        prefix) and free. `prefix_hit_rate`: the fraction of the prompts' tokens that were found. `preemptions`.
        `tokens`: in and out. `steps`: of prompts alone (prefill), of decodes alone, and mixed.
        """
        return stats_of_engine(self)

    # what trainers call
    load_weights = rollout.load_weights
    pause, resume, reset_prefix_cache = rollout.pause, rollout.resume, rollout.reset_prefix_cache
    sleep, wake_up, is_sleeping = rollout.sleep, rollout.wake_up, rollout.is_sleeping

    @property
    def _step_callers(self) -> StepCallers:
        return self.__dict__.setdefault("step_callers", StepCallers(self.engine_thread))  # atomic, as any thread asks

    def __repr__(self) -> str:
        return described(self.config)

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.exit()


class Stopwatch:
    """`seconds` by name: the time from the previous lap, or from the beginning, to the lap of that name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._begin = perf_counter()

    def lap(self, name: str) -> None:
        self.seconds[name] = perf_counter() - self._begin - sum(self.seconds.values())
