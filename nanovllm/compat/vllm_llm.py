"""nano-vllm's LLM with the methods of vLLM's LLM."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from nanovllm.compat.params import RESTRICTIONS, BeamSearchParams, FlatLogprobs, SamplingParams, restricted_schema
from nanovllm.compat.vllm_pooling import PoolingCalls
from nanovllm.compat.vllm_settings import select
from nanovllm.engine.outputs import RequestOutput
from nanovllm.features import beam_search as beams
from nanovllm.reasoning.formats import FORMATS
from nanovllm.requests.prompts import as_list, as_prompts
from nanovllm.utils.checks import check_bool, check_choice, check_int

PROMPT_KEYS = ("prompt", "prompt_token_ids")
UNUSED: dict[str, tuple] = {  # arguments and prompt keys that only vLLM has, with the values that change nothing here
    "cache_salt": (None,),
    "chat_template_content_format": ("auto",),
    "mm_processor_kwargs": (None, {}),
    "multi_modal_uuids": (None, {}),
    "token_type_ids": (None,),
}


@dataclass
class BeamSearchSequence:
    tokens: list[int]
    cum_logprob: float
    text: str


@dataclass
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


class LLM(PoolingCalls):
    """nano-vllm's LLM with the methods of vLLM's LLM. The default of `seed` is 0, as in vLLM."""

    def __init__(
        self,
        model: str,
        *,
        chat_template: str | None = None,
        skip_tokenizer_init: bool = False,
        reasoning_parser: str = "",
        **settings: Any,
    ):
        """Raises the same errors as nano-vllm's LLM.

        chat_template: the default template of `chat`.
        skip_tokenizer_init: if True, prompts must be token ids, and answers have no text. The tokenizer's files must
        exist in any case.
        reasoning_parser: the model's reasoning format, which structured outputs and reasoning budgets need.
        """
        check_choice("reasoning_parser", reasoning_parser, ("", *FORMATS))
        check_bool("skip_tokenizer_init", skip_tokenizer_init)
        self._restrictions = dict.fromkeys(RESTRICTIONS, False)
        if isinstance(config := settings.get("structured_outputs_config"), dict):
            self._restrictions = {name: config.get(name, False) for name in RESTRICTIONS}
            settings["structured_outputs_config"] = {x: config[x] for x in config if x not in RESTRICTIONS}
        for name, value in self._restrictions.items():
            check_bool(name, value)
        if settings.get("distributed_executor_backend") == "external_launcher":  # each rank is a process of the caller
            if (size := settings.get("tensor_parallel_size") or 1) != 1:
                raise ValueError(f"tensor_parallel_size={size}: must be 1, as ranks can't be processes of the caller")
            settings = settings | {"distributed_executor_backend": None}
        super().__init__(model, **{"seed": 0} | settings)
        self.chat_template, self.skip_tokenizer_init = chat_template, skip_tokenizer_init
        self.reasoning_parser = reasoning_parser or None

    @property
    def llm_engine(self) -> "LLM":
        return self

    @property
    def model_executor(self) -> SimpleNamespace:
        """As in vLLM, trainers load weights with `driver_worker.model_runner.model.load_weights` of this object."""
        model = SimpleNamespace(load_weights=self.load_weights)
        return SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))

    @cached_property
    def model_config(self) -> SimpleNamespace:
        model, config = self.config.model_config, self.config
        names = ("model", "tokenizer", "dtype", "max_model_len", "max_logprobs", "seed", "revision", "quantization")
        values = {name: getattr(config, name) for name in names}
        return SimpleNamespace(**values, get_vocab_size=lambda: model.vocab_size)

    @cached_property
    def vllm_config(self) -> SimpleNamespace:
        parts = dict.fromkeys(("cache_config", "parallel_config", "scheduler_config"), self.config)
        return SimpleNamespace(model_config=self.model_config, **parts)

    def get_num_unfinished_requests(self) -> int:
        return sum(self.stats()["requests"].values())

    def has_unfinished_requests(self) -> bool:
        return not self.is_finished()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return vLLM's default parameters, updated with the values in the model's `generation_config.json`."""
        params = self.input_processor.default_sampling_params(SamplingParams)
        assert isinstance(params, SamplingParams)
        return params

    def generate(  # type: ignore[override]
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        use_tqdm: Any = True,
        priority: list[int] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """Return the complete answers. Raises the same errors as `nanovllm.LLM.generate`.

        use_tqdm: whether to show nano-vllm's progress bar. If `use_tqdm` is a function, it counts as True, and is not
            called.
        tokenization_kwargs: may contain `add_special_tokens`, and `truncate_prompt_tokens` (the number of tokens to
            keep at the end of a prompt).
        """
        select("argument", unused, (), UNUSED)
        prompts = [self._prompt(prompt, **tokenization_kwargs or {}) for prompt in as_prompts(prompts)]
        lora_request = lora_request or None
        answers = super().generate(prompts, self._params(sampling_params), bool(use_tqdm), priority, lora_request)
        return _with_logprobs(answers, sampling_params)

    def chat(  # type: ignore[override]
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations. `options` are further arguments of `nanovllm.LLM.chat`."""
        names = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs", "priority")
        options = select("argument", options, names, UNUSED) | {"lora_request": lora_request or None}
        template = chat_template or self.chat_template
        answers = super().chat(messages, self._params(sampling_params), bool(use_tqdm), template, **options)
        return _with_logprobs(answers, sampling_params)

    def beam_search(  # type: ignore[override]
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Run beam search for at most `concurrency_limit` prompts at a time; `None` means no limit."""
        prompts = [self._prompt(prompt) for prompt in as_prompts(prompts)]
        lora_request = lora_request or None
        adapters = lora_request if isinstance(lora_request, list) else [lora_request] * len(prompts)
        limit = len(prompts) or 1
        limit = limit if concurrency_limit is None else check_int("concurrency_limit", concurrency_limit, low=1)
        outputs: list[beams.BeamSearchOutput] = []
        for first in range(0, len(prompts), limit):
            outputs += super().beam_search(
                prompts[first : first + limit], params, use_tqdm, lora_request=adapters[first : first + limit]
            )
        return [BeamSearchOutput([*self._beams(output)]) for output in outputs]

    def _params(self, params: Any) -> Any:
        """Apply this LLM's settings to a SamplingParams object, or to each object in a list.

        The method applies `skip_tokenizer_init`, the reasoning format, and the restrictions of JSON schemas.
        """
        if isinstance(params, (list, tuple)):
            return [self._params(item) for item in params]
        params = self.get_default_sampling_params() if params is None else params
        params = replace(params, detokenize=False) if self.skip_tokenizer_init else params
        if params.structured_outputs is not None or params.thinking_token_budget is not None:
            params = replace(params, reasoning_parser=params.reasoning_parser or self.reasoning_parser)
        if not any(self._restrictions.values()) or "json" not in (params.structured_outputs or {}):
            return params
        schema = restricted_schema(params.structured_outputs["json"], **self._restrictions)
        return replace(params, structured_outputs={"json": schema})

    def _beams(self, output: beams.BeamSearchOutput) -> Iterator[BeamSearchSequence]:
        for beam in output.outputs:
            tokens = output.prompt_token_ids + beam.token_ids
            yield BeamSearchSequence(tokens, beam.cumulative_logprob, self.tokenizer.decode(tokens))

    def _prompt(self, prompt: Any, add_special_tokens: bool = True, truncate_prompt_tokens: int | None = None) -> Any:
        """Drop unused keys from a prompt, and tokenize or truncate the prompt if the arguments require it."""
        if isinstance(prompt, dict):
            of_images = ("mm_processor_kwargs",) if prompt.get("multi_modal_data") else ()
            prompt = select("key of a prompt", prompt, (*PROMPT_KEYS, "multi_modal_data", *of_images), UNUSED)
        given_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        if self.skip_tokenizer_init and isinstance(given_ids, str | None):
            raise ValueError(f"prompt={prompt!r:.80}: must have token ids, because of `skip_tokenizer_init=True`")
        if add_special_tokens and truncate_prompt_tokens is None:
            return prompt
        parts = prompt if isinstance(prompt, dict) else {PROMPT_KEYS[not isinstance(prompt, str)]: prompt}
        text, ids = map(parts.get, PROMPT_KEYS)
        ids = (
            self.input_processor.encode(text, add_special_tokens)
            if isinstance(text, str) and ids is None
            else as_list(ids)
        )
        if truncate_prompt_tokens is not None:
            limit = check_int("truncate_prompt_tokens", truncate_prompt_tokens, low=-1)
            limit = self.model_config.max_model_len - 1 if limit == -1 else limit
            ids = None if ids is None else ids[max(0, len(ids) - limit) :]
        return parts | {"prompt": text, "prompt_token_ids": ids}


def _with_logprobs(answers: list[RequestOutput], params: Any) -> list[RequestOutput]:
    """Convert the log-probabilities of answers to lists, or to FlatLogprobs if a request sets `flat_logprobs`."""
    each = params if isinstance(params, (list, tuple)) else [params] * len(answers)
    kinds = (FlatLogprobs if getattr(request_params, "flat_logprobs", False) else list for request_params in each)
    return [_with_type(answer, kind) for answer, kind in zip(answers, kinds)]


def _with_type(answer: RequestOutput, kind: type) -> RequestOutput:
    outputs = [x if x.logprobs is None else replace(x, logprobs=kind(x.logprobs)) for x in answer.outputs]
    of_prompt = answer.prompt_logprobs
    return replace(answer, outputs=outputs, prompt_logprobs=None if of_prompt is None else kind(of_prompt))
