"""The public methods of an engine."""

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
from nanovllm.engine.collector import OutputCollector, StepOutput
from nanovllm.engine.engine_thread import EngineThread, Submission
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.outputs import OutputKind, RequestOutput
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.stats import described, stats_of
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.requests.request import Adapters, Prompt
from nanovllm.requests.step_callers import StepCallers
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.requests.streams import events_of
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int
from nanovllm.utils.loader import load_tokenizer
from nanovllm.utils.progress import progress_bar
from nanovllm.utils.waiting import waiting_for

logger = logging.getLogger("nanovllm")
PROGRESS_SECONDS = 0.1  # between updates of a progress bar


class LLMEngine:
    """Generates answers to many requests at the same time.

    `generate` returns complete answers, and `stream` yields pieces of answers as they arrive. Callers that run the
    engine loop themselves use `add_request`, `step`, `abort` and `is_finished`. All methods are thread-safe, and each
    caller gets only the outputs of its requests.

    If a step fails, all requests are dropped, and every waiting caller gets a RuntimeError whose `__cause__` is the
    step's error. An engine with one rank stays usable, and an engine with several ranks is closed. An engine is a
    context manager, and `exit` frees its memory.
    """

    @takes_settings_of(Config)
    def __init__(self, model: str, **settings: Any) -> None:
        """Load `model`. `settings` are fields of `nanovllm.config.Config`, which describes defaults and errors.

        Raises RuntimeError if a rank does not start.
        """
        startup = Stopwatch()
        self.config = Config.create(model, settings)
        startup.part_done("settings")
        # importing transformers takes seconds; the model is loaded meanwhile
        with waiting_for(f"Loading {model}"), ThreadPoolExecutor(1) as pool:
            tokenizer = pool.submit(load_tokenizer, str(self.config.tokenizer))
            self.core = build_engine(self.config, startup.part_done)
            try:
                self.tokenizer = tokenizer.result()
                self.input_processor = InputProcessor(self.config, self.tokenizer)
                self.input_processor.helpers["adapters"] = self.core.adapters
            except BaseException as error:
                self.core.close_after(error)
                raise
        startup.part_done("tokenizer")  # counts only the wait after the model was loaded
        self.startup_seconds = startup.seconds
        if self.tokenizer.eos_token_id is not None:
            self.config.resolve(eos=self.tokenizer.eos_token_id)
        # the thread starts only now: the caller's thread loads the model, so that Ctrl-C can end it
        self.engine_thread = EngineThread(self.core)
        weakref.finalize(self, self.engine_thread.exit)  # registered first, so that a started thread always ends
        self.engine_thread.start()
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", repr(self))  # a string, because a stored log record would keep the engine alive

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: list[int] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Return the answers to one or more prompts, in the order of the prompts.

        A prompt is a string, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a conversation.
        `sampling_params` and `lora_request` (an adapter or None) are one object for all prompts, or a list with one per
        prompt. By default, the model recommends the sampling parameters. `priority` is a list: see `add_request`.

        If a prompt is invalid, no prompt is queued: see `add_request` for the errors. Ctrl-C drops the requests of this
        call. `use_tqdm` shows a progress bar on a terminal or in a notebook.
        """
        requests = self.input_processor.requests(
            prompts, sampling_params, OutputKind.FINAL_ONLY, priority=priority, lora_request=lora_request
        )
        return self._run(requests, use_tqdm)

    def _run(self, requests: list[Any], use_tqdm: bool, desc: str = "Generating") -> list[Any]:
        """Submit requests, and return their outputs in the order of the requests."""
        outputs: dict[int, Any] = {}
        collector = OutputCollector(OutputKind.FINAL_ONLY, max_seconds=PROGRESS_SECONDS if use_tqdm else inf)
        submission = Submission(self.engine_thread, requests, collector)
        bar: Any = nullcontext(lambda num_finished, **num_tokens: None)
        if use_tqdm:
            bar = progress_bar(len(requests), desc=desc, dynamic_ncols=True)
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
        lora_request: Adapters = None,
    ) -> Iterator[StreamEvent]:
        """Yield the answers of `generate` piece by piece. Events of different prompts are interleaved.

        Text that might be part of a stop string is held back, and no piece ends within a character.
        `chat_template_kwargs` apply to conversations. If a prompt is invalid, the call of `stream` itself raises the
        error, before any iteration. The first call of `next` queues the requests. Leaving the loop drops the unfinished
        requests. The engine runs at most 32 steps ahead of the reader, unless other callers need more steps.
        """
        self.engine_thread.check_open()
        requests = self.input_processor.requests(
            prompts, sampling_params, OutputKind.DELTA, chat_template_kwargs, priority, lora_request
        )
        return events_of(requests, self.engine_thread)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        lora_request: Adapters = None,
    ) -> int:
        """Queue a request and return its id. The calling thread gets the request's output from later calls of `step`.

        If `scheduling_policy` is "priority", the request with the lowest `priority` comes first. If `scheduling_policy`
        is "fcfs", `priority` must be 0.

        Raises ValueError if the prompt is empty, has `max_model_len` tokens or more, or contains a token id outside the
        vocabulary. Raises TypeError for anything that is not a prompt. Also raises the errors of a custom scheduling
        policy and of `lora.adapter_registry.AdapterRegistry.get`. After an error, nothing is queued.
        """
        self.engine_thread.check_open()
        request = self.input_processor.request(prompt, sampling_params, OutputKind.TOKENS, priority=priority)
        requests = self.input_processor.with_adapters([request], lora_request)
        self.engine_thread.submit(requests, self._step_callers.own_collector())
        return request.request_id

    def abort(self, request_id: int) -> None:
        """End a request before the next step. The request's caller gets all tokens so far.

        Does nothing if the request has ended. Signal handlers may call `abort`. Raises ValueError for an unknown id.
        """
        if not (num_requests := self.input_processor.num_requests):
            raise ValueError(f"request_id={request_id!r}: there has been no request yet")
        self.engine_thread.abort(check_int("request_id", request_id, low=0, high=num_requests - 1))

    def step(self) -> StepOutput:
        """Return the new outputs of the calling thread's requests. If the thread has no new outputs, run a step first.

        A thread that has added no request, such as a server's loop, gets the outputs of all threads that never call
        `step`. Ctrl-C drops no request.
        """
        return self._step_callers.step()

    def is_finished(self) -> bool:
        return self._step_callers.is_finished()

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def workers(self) -> Any:
        """The other ranks: a `distributed.worker.Workers` or, if there is no other rank, a `SingleRank`."""
        return self.core.workers

    @property
    def model_runner(self) -> ModelRunner | None:
        return self.core.model_runner

    def exit(self) -> None:
        """Drop unfinished requests and free the device's memory. The engine can't be used afterwards."""
        self.engine_thread.exit()
        self.input_processor.close()

    def stats(self) -> dict[str, Any]:
        """Return statistics: the counts since the start, and the current state.

        `requests`: the numbers of waiting and running sequences. Each of a prompt's `n` answers is a sequence.
        `blocks`: the numbers of used, cached and free blocks. A cached block is a free block that the prefix cache
        still contains.
        `block_groups`: the blocks that each group of layers uses, if there are several groups.
        `prefix_hit_rate`: the fraction of prompt tokens that were found in the prefix cache.
        `tiers`, with `swap_space`: `device_hits` and `host_hits` count the prompt tokens that were found in the
        device's cache and in host memory. `loaded_blocks` is the number of blocks that were copied back from host
        memory. `stored_blocks` is the number of blocks that were copied to host memory. `lost_copies` is the number of
        failed copies. Host memory has `host_rows` rows, of which `host_rows_used` contain blocks or states. A block
        takes one row, and a state takes several rows. If `swap_dir` is set, `disk_blocks` is the number of blocks that
        were read from files. `disk_hits` is the number of prompt tokens in these blocks, and `disk_files` is the number
        of files.
        `preemptions`: how often a sequence was preempted.
        `tokens`: the numbers of prompt tokens (`in`) and generated tokens (`out`).
        `pooled`, for tasks other than "generate": a dict that maps the task to the number of prompts whose vector was
        computed.
        `steps`: the numbers of `prefill` steps (chunks of prompts), `decode` steps and `mixed` steps (both).
        """
        if self.model_runner is None:  # after `exit`
            return stats_of(self.scheduler)
        return self.engine_thread.call(lambda: stats_of(self.scheduler))

    # for trainers
    load_weights = rollout.load_weights
    pause, resume, reset_prefix_cache = rollout.pause, rollout.resume, rollout.reset_prefix_cache
    sleep, wake_up, is_sleeping = rollout.sleep, rollout.wake_up, rollout.is_sleeping

    @property
    def _step_callers(self) -> StepCallers:
        return self.__dict__.setdefault("step_callers", StepCallers(self.engine_thread))  # atomic: any thread may ask

    def __repr__(self) -> str:
        return described(self.config)

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.exit()


class Stopwatch:
    """Measures consecutive phases, each of which `part_done` ends."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._begin = perf_counter()

    def part_done(self, name: str) -> None:
        self.seconds[name] = perf_counter() - self._begin - sum(self.seconds.values())
