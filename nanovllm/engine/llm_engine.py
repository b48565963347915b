"""Requests in, text out: the facade over scheduler and model runner."""
import secrets
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Integral
from time import perf_counter

import xxhash
from tqdm import tqdm

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sampled import SampledTokens
from nanovllm.engine.scheduler import ScheduledStep, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.stopwatch import Stopwatch

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one turn of the loop brought to the host.

    finished: the answers that ended, as `generate` returns them, with their `request_id`.
    new_tokens: (request id, token id) of every token that arrived.
    """

    finished: list[dict] = field(default_factory=list)
    new_tokens: list[tuple[int, int]] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class LLMEngine:
    """Generates for many requests at once.

    `generate` does it all; `add_request`, `step` and `is_finished` are the loop for those who want to hold it. With
    `async_scheduling` a step's tokens reach the host one turn late, while the next step runs. An engine is a context
    manager, and `exit` frees its memory. `startup_seconds` says where the time of its start went.
    """

    def __init__(self, model: str, **settings):
        """`settings` are the fields of `nanovllm.config.Config`, which states their defaults and errors."""
        startup = Stopwatch()
        self.config = Config.create(model, settings)
        startup.lap("settings")
        with ThreadPoolExecutor(1) as pool:  # transformers takes seconds to import, and others work meanwhile
            tokenizer = pool.submit(_load_tokenizer, self.config.model)
            self.model_runner: ModelRunner | None = ModelRunner(self.config, startup)
            try:
                self.tokenizer = tokenizer.result()
            except BaseException:
                self.model_runner.exit()
                raise
        startup.lap("tokenizer")  # what was still to wait for
        self.startup_seconds = startup.seconds
        block_manager = BlockManager(
            self.model_runner.num_kvcache_blocks, self.config.kvcache_block_size, self.config.enable_prefix_caching
        )
        bounds = self.config.max_num_seqs, self.config.max_num_batched_tokens
        self.scheduler = Scheduler(block_manager, *bounds, self.config.model_config.eos_token_ids)
        self._num_requests = 0
        self._in_flight: tuple[ScheduledStep, SampledTokens] | None = None

    def generate(
        self, prompts: Prompt | list[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict]:  # fmt: skip
        """Answers to one prompt or many, in their order.

        A prompt is a string or a list of token ids; `sampling_params` one for all, or one for each. An answer has
        `request_id`, `text`, `token_ids` (the end-of-sequence id included), `finish_reason` ("stop" or "length") and
        `num_cached_tokens`. Nothing is queued unless every prompt is good: ValueError or TypeError else, as of
        `add_request`. Ctrl-C and errors drop this call's requests and leave the engine ready for the next.
        """
        self._check_open()
        if not self.is_finished():
            raise RuntimeError("generate: requests from add_request are unfinished; call step() until is_finished()")
        prompts = _as_prompts(prompts)
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: give one, or as many")
        seqs = [self._make_sequence(i, *request) for i, request in enumerate(zip(prompts, sampling_params))]
        answers: dict[int, dict] = {}
        try:
            for seq in seqs:
                self._add(seq)
            with ProgressBar(len(seqs), disable=not use_tqdm) as bar:
                while len(answers) < len(seqs):
                    output = self.step()
                    bar.show(output)
                    answers |= {answer["request_id"]: answer for answer in output.finished}
        except BaseException:
            self._drop_everything()
            raise
        return [answers[seq.request_id] for seq in seqs]

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a request; its id.

        Raises before anything is queued: ValueError for an empty prompt, one that is not shorter than
        `max_model_len`, or a token id outside the vocabulary; TypeError for something else than text or ids.
        """
        self._check_open()
        seq = self._make_sequence(0, prompt, sampling_params)
        self._add(seq)
        return seq.request_id

    def step(self) -> StepOutput:
        """One turn of the loop: queue the next step, and take in what has been computed.

        If it raises, every request is dropped; the engine can go on with new ones.
        """
        self._check_open()
        try:
            scheduled = self.scheduler.schedule()
            launched = (scheduled, self.model_runner.run(scheduled)) if scheduled else None
            if self.config.async_scheduling:
                launched, self._in_flight = self._in_flight, launched
            return self._take_in(*launched) if launched else StepOutput()
        except BaseException:
            self._drop_everything()
            raise

    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.scheduler.is_finished()

    def _take_in(self, step: ScheduledStep, tokens: SampledTokens) -> StepOutput:
        token_ids = tokens.wait().token_ids
        new_tokens = [(s.request_id, i) for s, i in zip(step.sampled, token_ids) if s.finish_reason is None]
        finished = self.scheduler.postprocess(step, token_ids)
        num_prefill, num_decode = (step.num_tokens, 0) if step.is_prefill else (0, len(new_tokens))
        return StepOutput([self._answer(seq) for seq in finished], new_tokens, num_prefill, num_decode)

    def _answer(self, seq: Sequence) -> dict:
        token_ids = seq.completion_token_ids
        return {
            "request_id": seq.request_id,
            "text": self.tokenizer.decode(token_ids, skip_special_tokens=True),
            "token_ids": token_ids,
            "finish_reason": seq.finish_reason,
            "num_cached_tokens": seq.num_cached_tokens,
        }

    def _make_sequence(self, offset: int, prompt: Prompt, params: SamplingParams | None) -> Sequence:
        """The sequence of the request after the next `offset` ones; checks all that can be wrong with it."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: must be a SamplingParams")
        token_ids = self._token_ids(prompt)
        if not token_ids:
            raise ValueError("prompt: is empty; it must hold at least 1 token")
        bound = self.config.max_model_len
        if len(token_ids) >= bound:
            raise ValueError(f"prompt: has {len(token_ids)} tokens; it must be shorter than max_model_len={bound}")
        vocab_size = self.config.model_config.vocab_size
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"prompt: token id {token_id} is outside of the vocabulary (0 to {vocab_size - 1})")
        request_id = self._num_requests + offset
        return Sequence(request_id, token_ids, params, self._noise_seed(params, request_id), bound)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids = _as_list(prompt)
        kinds = None if ids is None else set(map(type, ids))
        if kinds is None or any(kind is bool or not issubclass(kind, Integral) for kind in kinds):
            raise TypeError(f"prompt={prompt!r:.80}: must be a string or a list of token ids")
        return ids if kinds == {int} else [int(i) for i in ids]

    def _noise_seed(self, params: SamplingParams, request_id: int) -> int:
        if params.seed is not None:
            return params.seed
        if self.config.seed is not None:
            return xxhash.xxh3_64_intdigest(struct.pack("<QQ", self.config.seed, request_id))
        return secrets.randbits(64)

    def _add(self, seq: Sequence) -> None:
        self._num_requests += 1
        self.scheduler.add(seq)

    def _drop_everything(self) -> None:
        self.model_runner.recover()  # what was queued still reads the host's buffers
        self._in_flight = None
        self.scheduler.abort_all()

    def exit(self) -> None:
        """Drop what is unfinished and free the device's memory; an engine that was left can't be used again."""
        if self.model_runner is not None:
            self._drop_everything()
            self.model_runner.exit()
            self.model_runner = None

    def _check_open(self) -> None:
        if self.model_runner is None:
            raise RuntimeError("this engine was closed by exit()")

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.exit()


def _load_tokenizer(model: str):
    from transformers import AutoTokenizer  # here, so that the package imports without it

    return AutoTokenizer.from_pretrained(model)


def _as_list(value) -> list | None:
    """A list of what is a list, a tuple, an iterator, an array or a tensor; None of anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, (list, tuple, Iterator)) else None


def _as_prompts(prompts) -> list[Prompt]:
    """A list of prompts, of what may be a single one: a string, or a flat list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if (items := _as_list(prompts)) is None:
        raise TypeError(f"prompts={prompts!r:.80}: must be a string, a list of token ids, or a list of those")
    return [items] if items and all(issubclass(kind, Integral) for kind in set(map(type, items))) else items


class ProgressBar(tqdm):
    """Requests that are done, and tokens per second of the last prefill and the last decode step."""

    def __init__(self, total: int, disable: bool):
        super().__init__(total=total, desc="Generating", disable=disable, dynamic_ncols=True)
        self.rates: dict[str, str] = {}
        self.last = perf_counter()

    def show(self, output: StepOutput) -> None:
        now = perf_counter()
        for kind, num_tokens in (("prefill", output.num_prefill_tokens), ("decode", output.num_decode_tokens)):
            if num_tokens:
                self.rates[kind] = f"{num_tokens / (now - self.last):.0f} tok/s"
        self.last = now
        self.set_postfix(self.rates, refresh=False)
        self.update(len(output.finished))
