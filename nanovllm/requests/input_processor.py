"""Checks prompts and parameters, and turns them into requests. Errors are raised before anything is queued."""

import operator
import secrets
import struct
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import xxhash

from nanovllm.config import Config
from nanovllm.engine.features import FEATURES
from nanovllm.engine.outputs import OutputKind
from nanovllm.engine.scheduling_policy import FCFS, SchedulingPolicy, make_policy
from nanovllm.engine.sequence import Sequence
from nanovllm.pooling.task import check_task
from nanovllm.requests.detokenizer import TokenBytes
from nanovllm.requests.prompts import as_priorities, as_prompts
from nanovllm.requests.read_prompts import read_images, read_prompt
from nanovllm.requests.recommended_params import recommended_params
from nanovllm.requests.request import Adapters, CompletionRequest, Prompt
from nanovllm.requests.streamed_request import StreamedRequest
from nanovllm.sampling_params import SamplingParams, check_token_ids
from nanovllm.utils.checks import check_int, check_unicode

MAX_REQUESTS = 2**62
MAX_PRIORITY = 2**63 - 1  # the minimum is -MAX_PRIORITY


class InputProcessor:
    """Makes requests. Any thread may call the methods of this class at any time."""

    def __init__(self, config: Config, tokenizer, first_request_id: int = 0):
        assert config.max_model_len is not None, "it is resolved on construction"
        self.config, self.tokenizer, self.max_model_len = config, tokenizer, (n := config.max_model_len)
        # a generated answer has at least one token
        self.max_prompt_tokens, bound = (n - 1, "fewer than") if config.task == "generate" else (n, "at most")
        self.length_bound = f"{bound} max_model_len (this model's maximum context length is {n} tokens)"
        self.policy: SchedulingPolicy | None = None  # first come, first served
        if config.scheduling_policy != "fcfs":
            self.policy = make_policy(config.scheduling_policy)
        self._features = dict(FEATURES)  # a copy, because features may be registered later
        self.token_bytes = TokenBytes(tokenizer, skip_special_tokens=True)
        self.all_token_bytes = TokenBytes(tokenizer, skip_special_tokens=False)  # also for log-probabilities
        self.tokenizer_lock = threading.RLock()  # because the tokenizer is not thread-safe
        self.helpers: dict[Any, Any] = {}  # objects of features, each made for the first request that needs it
        self.cleanup = ExitStack()  # features add what ends their helpers' threads and processes
        self._seed = secrets.randbits(64) if config.seed is None else config.seed
        # an iterator, because `next` is atomic even for signal handlers that add requests
        self._unused_ids = iter(range(first_request_id, MAX_REQUESTS))

    @property
    def num_requests(self) -> int:
        """The number of requests so far. All request ids are below the number of requests."""
        return MAX_REQUESTS - operator.length_hint(self._unused_ids)

    def next_request_id(self) -> int:
        return next(self._unused_ids)

    def close(self) -> None:
        self.cleanup.close()

    def default_sampling_params(self, kind: type[SamplingParams] = SamplingParams) -> SamplingParams:
        """Return the parameters that the model recommends.

        Parameters without a recommendation have the defaults of `kind`.
        """
        return recommended_params(self.config.model, kind)

    def requests(
        self,
        prompts,
        sampling_params,
        kind: OutputKind,
        template_arguments: Mapping | None = None,
        priority=None,
        lora_request: Adapters = None,
    ) -> list[CompletionRequest]:
        """Make a request for each prompt. See `LLMEngine.generate`."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        is_plain = isinstance(prompts, list) and all(isinstance(prompt, (str, list)) for prompt in prompts)
        if not is_plain or priority is not None:
            prompts = as_prompts(prompts)
            priority = as_priorities(priority, len(prompts))
        sampling_params = self.default_sampling_params() if sampling_params is None else sampling_params
        params = sampling_params if isinstance(sampling_params, (list, tuple)) else [sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts: pass one, or one for each")
        if self.config.model_config.vision is not None:
            prompts = read_images(prompts, self)
        per_prompt = zip(prompts, params, priority or [0] * len(prompts))
        requests = [
            self.request(prompt, prompt_params, kind, i, template_arguments, prompt_priority)
            for i, (prompt, prompt_params, prompt_priority) in enumerate(per_prompt)
        ]
        return self.with_adapters(requests, lora_request)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        kind: OutputKind,
        index: int = 0,
        template_arguments: Mapping | None = None,
        priority: int = 0,
    ) -> CompletionRequest:
        """Make a request for one prompt. `index` is the prompt's position in the caller's list."""
        check_task(self.config, "generate")
        priority = self.check_priority(priority)
        params = self.default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: must be a SamplingParams")
        text, ids, images = self.tokenize(prompt, template_arguments)
        check_token_ids("stop_token_ids", params.stop_token_ids, self.config.model_config.vocab_size)
        request_id = self.next_request_id()
        seed = _derived_seed(self._seed, request_id) if params.seed is None else params.seed
        seeds = [seed, *(_derived_seed(seed, i) for i in range(1, params.n))]
        shared = dict(request_id=request_id, max_len=self.max_model_len, priority=priority)
        group = [Sequence([*ids], params, noise_seed=seed, index=i, **shared) for i, seed in enumerate(seeds)]
        for seq in group:
            seq.group = group
            if images is not None:
                seq.feature_state["vision"] = images
        token_bytes = self.token_bytes if params.skip_special_tokens else self.all_token_bytes
        request_class: type[CompletionRequest] = CompletionRequest
        if kind is not OutputKind.FINAL_ONLY:
            request_class = StreamedRequest
        request = request_class(group, text, kind, token_bytes, index)
        for name, feature in self._features.items():
            if feature.is_asked_for(params):
                for seq in group:
                    seq.feature_state[name] = None
                feature.load().attach(request, self)
        self.set_order(*group)
        return request

    def with_adapters(self, requests: list[Any], lora_request: Adapters) -> list[Any]:
        """Return the requests with their adapters."""
        if self.config.enable_lora or lora_request is not None:
            from nanovllm.lora.adapters import set_adapters  # few engines have adapters

            set_adapters(requests, lora_request, self)
        return requests

    def check_priority(self, priority: int) -> int:
        priority = check_int("priority", priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        if priority and (self.policy is None or type(self.policy) is FCFS):
            raise ValueError(f"priority={priority}: must be 0 with scheduling_policy='fcfs'; set it to 'priority'")
        return priority

    def set_order(self, *group: Sequence) -> None:
        """Set a request's place in the order of the scheduling policy, whose errors reach the caller here."""
        priority_key = 0 if self.policy is None else self.policy.priority_key(group[0])
        for seq in group:
            seq.set_order(priority_key)

    def tokenize(self, prompt: Prompt, template_arguments: Mapping | None = None) -> tuple[str | None, list[int], Any]:
        """Return the text (if it is known), the token ids, and the PromptImages (if any) of a prompt."""
        if not isinstance(template_arguments, Mapping | None):
            raise TypeError(f"chat_template_kwargs={template_arguments!r:.80}: must be a dict")
        text: str | None = None
        ids: Any = prompt
        images = None
        if isinstance(prompt, str):
            text, ids = prompt, self.encode(prompt)
        elif not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
            text, ids, images = read_prompt(prompt, template_arguments or {}, self)
        if not ids:
            raise ValueError("prompt: a decoder prompt cannot be empty; it must have at least 1 token")
        if len(ids) > self.max_prompt_tokens:
            raise ValueError(f"prompt: has {len(ids)} tokens; must be {self.length_bound}")
        check_token_ids("prompt", (min(ids), max(ids)), self.config.model_config.vocab_size)
        return text, ids, images

    def encode(self, text: str, add_special_tokens: bool = True, is_cut: bool = False) -> list[int]:
        """Return the token ids of a text. Only the subclass method `PromptLane.encode` uses `is_cut`."""
        check_unicode("prompt", text)
        with self.tokenizer_lock:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)


def _derived_seed(seed: int, number: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, number))
