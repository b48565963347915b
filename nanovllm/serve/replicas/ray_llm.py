"""Defines `RayLLM`, for offline generation on several engines."""

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice, repeat
from queue import Empty, SimpleQueue
from time import time
from typing import Any

from nanovllm.engine.outputs import CompletionOutput, OutputKind, RequestMetrics, RequestOutput
from nanovllm.llm import LLM
from nanovllm.requests.request import CompletionRequest, Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.replicas import actors
from nanovllm.serve.replicas.driver import ANSWERS_PER_SEQ, make_processor
from nanovllm.serve.replicas.group import RESTART_TIMEOUT
from nanovllm.serve.replicas.replica_request import ReplicaRequest
from nanovllm.serve.replicas.routing import Router
from nanovllm.utils.checks import check_int
from nanovllm.utils.progress import progress_bar
from nanovllm.utils.waiting import waiting_for

SUBMIT_BATCH = 64  # requests that are sent together
REORDERED = 4  # prompts are read at most `REORDERED * _window` positions ahead of the next output


class RayLLM:
    """Works like LLM, but on N engines: `RayLLM(model, num_replicas=N, **settings).generate(prompts, sampling_params)`.

    The calling process checks and tokenizes the prompts, raises the same errors as LLM, and chooses the seeds of the
    sampling noise. If the `seed` setting is the same, RayLLM and LLM return the same tokens, unless rounding errors
    differ. If a request can't be computed, its `finish_reason` is "error", and its `stop_reason` is the error message.
    The docstring of ReplicaGroup explains what happens when a replica is lost.

    The methods are thread-safe. Leaving a `with` block calls `exit`.
    """

    def __init__(
        self,
        model: str,
        *,
        num_replicas: int = 1,
        router: Router | None = None,
        actor_options: dict[str, Any] | None = None,
        restart_timeout: float = RESTART_TIMEOUT,
        **settings: Any,
    ) -> None:
        """Start the replicas. `settings` are the settings of each replica's `LLM`. Raises the same errors as `LLM`.

        Ray chooses the devices. If `ray.init` was not called before, RayLLM joins the cluster at RAY_ADDRESS, or starts
        Ray on this machine.

        router: chooses a replica for each request; `None` selects a PrefixRouter.
        actor_options: Ray options for each replica's actor, for example `{"num_cpus": 8}` for replicas on CPUs.
        restart_timeout: the maximum duration of a lost replica's restart in seconds, including the wait for a GPU or a
            host.
        """
        num_replicas = check_int("num_replicas", num_replicas, low=1)
        self.input_processor = make_processor(model, settings)
        config = self.input_processor.config
        self.group = actors.make_group(
            model, settings, config, num_replicas, router, actor_options, restart_timeout=restart_timeout
        )
        self._window = ANSWERS_PER_SEQ * config.max_num_seqs * num_replicas  # requests in flight
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nanovllm-replicas", daemon=True)
        self._thread.start()
        self._is_open, self._owns_ray = True, False
        atexit.register(self.exit)
        try:
            with waiting_for(f"Starting {num_replicas} replicas of {model} with Ray"):
                self._owns_ray = actors.connect()
                self._run_in_loop(self.group.start())
        except BaseException:
            self.exit()
            raise

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """See `LLM.generate`. After Ctrl-C or an error, the requests of this call are dropped."""
        requests = self.input_processor.requests(prompts, sampling_params, OutputKind.FINAL_ONLY, None, priority)
        return self._run(requests, use_tqdm)

    # these methods of LLM use only `input_processor` and `_run`
    chat: Any = LLM.chat
    get_default_sampling_params: Any = LLM.get_default_sampling_params

    def get_tokenizer(self):
        """Return the tokenizer of the model, as transformers loads it."""
        return self.input_processor.tokenizer

    def generate_iter(
        self, prompts: Iterable[Prompt], sampling_params: SamplingParams | Iterable[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Yield outputs in the order of the prompts.

        The first outputs come before all prompts are read, so there may be any number of prompts. To limit the memory
        use, prompts and iterable parameters are read only when replicas can take more requests. If a prompt or its
        parameters are invalid, the output's `finish_reason` is "error". The `stop_reason` contains the prompt's index
        and the error message. Raises ValueError if there are fewer parameters than prompts.
        """
        outputs: dict[int, RequestOutput] = {}
        next_index = 0

        def end() -> int:
            return next_index + REORDERED * self._window

        for new_outputs in self._outputs(self._requests(prompts, sampling_params), end):
            outputs |= new_outputs
            while next_index in outputs:
                yield outputs.pop(next_index)
                next_index += 1

    def as_completed(
        self, prompts: Iterable[Prompt], sampling_params: SamplingParams | Iterable[SamplingParams] | None = None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield a pair (prompt index, output) whenever an output is complete.

        See `generate_iter` for everything else.
        """
        for new_outputs in self._outputs(self._requests(prompts, sampling_params)):
            yield from new_outputs.items()

    def stats(self) -> list[dict[str, Any] | None]:
        """Return a list with each replica's `LLM.stats()`, or `None` for a replica that is not running.

        Raises RuntimeError after `exit`.
        """
        self._check_open()
        return self._run_in_loop(self.group.stats())

    def exit(self) -> None:
        """End the replicas, and stop Ray if this object started it. Unfinished calls raise an EngineDeadError."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.exit)
        self._run_in_loop(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.input_processor.close()
        if self._owns_ray:
            actors.disconnect()

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.exit()

    async def _finish(self) -> None:
        """End the group. Cancel the tasks that Ray's streams left in the event loop."""
        await self.group.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run(self, requests: list[CompletionRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests, and return the outputs in the order of the requests.

        Methods that RayLLM shares with LLM call this method.
        """
        outputs: dict[int, RequestOutput] = {}
        bar = progress_bar(len(requests), desc="Generating", dynamic_ncols=True, disable=not use_tqdm)
        with bar as advance:
            for new_outputs in self._outputs(iter(requests)):
                num_tokens = sum(len(answer.token_ids) for output in new_outputs.values() for answer in output.outputs)
                advance(len(new_outputs), decode=num_tokens)
                outputs |= new_outputs
        return [outputs[i] for i in range(len(requests))]

    def _requests(self, prompts: Iterable[Prompt], sampling_params: Any) -> Iterator[CompletionRequest | RequestOutput]:
        """Yield a request for each prompt. If a prompt is refused, yield an output with the error instead."""
        if isinstance(prompts, (str, Mapping)):
            raise TypeError(f"prompts={prompts!r:.80}: must be an iterable of prompts")
        is_single = sampling_params is None or isinstance(sampling_params, SamplingParams)
        default = self.get_default_sampling_params()
        all_params = repeat(sampling_params) if is_single else iter(sampling_params)
        for i, prompt in enumerate(prompts):
            try:
                params = next(all_params)
            except StopIteration:
                raise ValueError(f"{i} sampling_params for more prompts: pass one, or one for each") from None
            try:
                yield self.input_processor.request(
                    prompt, default if params is None else params, OutputKind.FINAL_ONLY, i
                )
            except (ValueError, TypeError) as error:
                yield _refused(prompt, f"prompts[{i}]: {error}")

    def _outputs(
        self, requests: Iterator[CompletionRequest | RequestOutput], end: Callable[[], int] | None = None
    ) -> Iterator[dict[int, RequestOutput]]:
        """Yield dicts that map request indices to outputs, whenever requests have ended.

        end: a function that returns the index of the first request that must wait because too many earlier outputs are
            missing.
        """
        done: SimpleQueue[ReplicaRequest] = SimpleQueue()
        live: dict[int, tuple[int, ReplicaRequest]] = {}  # by id: (index, request)
        num_made, is_exhausted = 0, False
        try:
            while True:
                new_outputs: dict[int, RequestOutput] = {}
                while not is_exhausted:
                    count = min(SUBMIT_BATCH, self._window - len(live))
                    if end is not None:
                        count = min(count, end() - num_made)
                    if count <= 0:
                        break
                    made = [*islice(requests, count)]
                    started: dict[int, ReplicaRequest] = {}
                    for i, new in enumerate(made, num_made):
                        if isinstance(new, RequestOutput):
                            new_outputs[i] = new
                        else:
                            started[i] = ReplicaRequest(new, done.put)
                    live |= {request.request_id: (i, request) for i, request in started.items()}
                    num_made += len(made)
                    is_exhausted = len(made) < count
                    self._post(partial(self.group.submit, [*started.values()]))
                    if new_outputs:
                        break
                if not live and not new_outputs:
                    return
                for request in [] if new_outputs else _some_of(done):
                    index, _ = live.pop(request.request_id)
                    new_outputs[index] = self._output(request)
                yield new_outputs
        finally:
            if live and self._is_open:
                self._post(partial(self.group.discard, [request for _, request in live.values()]))

    def _output(self, request: ReplicaRequest) -> RequestOutput:
        if request.final is not None:
            return request.final
        if self.group.error is not None:
            raise self.group.error
        failed = [
            CompletionOutput(i, "", [], None, None, "error", str(request.error)) for i in range(request.num_answers)
        ]
        metrics = RequestMetrics(request.arrival_time, None, None, None)
        prompt = request.request.prompt, request.prompt_token_ids
        return RequestOutput(request.request_id, *prompt, failed, True, 0, None, metrics)

    def _post(self, call: Callable[[], None]) -> None:
        """Call a function in the event loop, without waiting. Raises RuntimeError after `exit`."""
        self._check_open()
        self._loop.call_soon_threadsafe(call)

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("this RayLLM was closed by exit()")


def _refused(prompt: Prompt, message: str) -> RequestOutput:
    """Return the output for a refused prompt."""
    answer = CompletionOutput(0, "", [], None, None, "error", message)
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(-1, text, [], [answer], True, 0, None, RequestMetrics(time(), None, None, None))


def _some_of(done: SimpleQueue) -> Iterator[ReplicaRequest]:
    """Wait for a finished request, then take a few other finished requests."""
    yield done.get()
    for _ in range(SUBMIT_BATCH // 4 - 1):
        try:
            yield done.get_nowait()
        except Empty:
            return
