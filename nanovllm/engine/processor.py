"""From what callers pass in to requests: every check of a prompt and its parameters is made here, before anything is queued."""

import itertools
import secrets
import struct
import threading
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path

import xxhash

from nanovllm.config import Config
from nanovllm.engine.beam_search import BeamRequest
from nanovllm.engine.detokenizer import Vocabulary
from nanovllm.engine.prompts import KINDS, Prompt, as_list, as_prompts, is_conversation, render_chat
from nanovllm.engine.request import Inbox, Request
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import BeamSearchParams, SamplingParams, bad_word_token_ids, check_beams, check_request
from nanovllm.utils.hub import read_json


class InputProcessor:
    """Makes requests. Any thread may call it at any time."""

    def __init__(self, config: Config, tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.num_requests = 0  # that ever were
        self._request_ids = itertools.count()
        self._lock = threading.RLock()
        self._shown, self._hidden = (
            Vocabulary(tokenizer, skip_special_tokens) for skip_special_tokens in (False, True)
        )

    def default_sampling_params(self) -> SamplingParams:
        """What the model's `generation_config.json` recommends; ours where it says nothing."""
        file = Path(self.config.model) / "generation_config.json"
        raw = read_json(file) if file.exists() else {}
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
        given = {name.replace("new_", ""): raw[name] for name in names if raw.get(name) is not None}
        try:
            return SamplingParams(**given | ({"temperature": 0.0} if raw.get("do_sample") is False else {}))
        except (ValueError, TypeError) as error:
            raise type(error)(f"{file}: {error}") from error

    def requests(
        self, prompts, sampling_params, inbox: Inbox, template_arguments: Mapping | None = None
    ) -> list[Request]:
        """Those of a call of many prompts, with parameters for all or for each."""
        prompts = as_prompts(prompts)
        params = sampling_params if isinstance(sampling_params, (list, tuple)) else [sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts: give one, or as many")
        default = self.default_sampling_params() if any(x is None for x in params) else None
        made = enumerate(zip(prompts, params))
        return [self.request(p, default if x is None else x, inbox, i, template_arguments) for i, (p, x) in made]

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        inbox: Inbox,
        index: int = 0,
        template_arguments: Mapping | None = None,
    ) -> Request:
        params = self.default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: must be a SamplingParams")
        text, token_ids = self._tokenize(prompt, template_arguments or {})
        model, bound = self.config.model_config, self.config.max_model_len
        with self._lock:
            bad_words = bad_word_token_ids(self.tokenizer, params.bad_words, model.vocab_size)
        check_request(params, model.vocab_size, model.eos_token_ids, self.config.max_logprobs, bad_words)
        request_id = self._next_id()
        seed = self._noise_seed(params, request_id)
        seeds = [seed, *(xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, i)) for i in range(1, params.n))]
        group = [Sequence(request_id, [*token_ids], params, s, bound, i) for i, s in enumerate(seeds)]
        for seq in group:
            seq.group, seq.bad_words = group, bad_words
        return Request(
            group, text, inbox, self._hidden if params.skip_special_tokens else self._shown, self._shown, index
        )

    def beam_requests(self, prompts, params: BeamSearchParams, inbox: Inbox) -> list[BeamRequest]:
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params={params!r}: must be a BeamSearchParams")
        model, bound = self.config.model_config, self.config.max_model_len
        check_beams(params, model.vocab_size)
        eos_token_ids = frozenset() if params.ignore_eos else model.eos_token_ids
        sampling_params = BeamRequest.sampling_params(params, len(eos_token_ids), model.vocab_size)
        made = []
        for text, token_ids in [self._tokenize(prompt, {}) for prompt in as_prompts(prompts)]:
            root = Sequence(self._next_id(), [*token_ids], sampling_params, 0, bound, pauses=True)
            made.append(BeamRequest(root, params, text, inbox, self._hidden, bound, eos_token_ids))
        return made

    def _next_id(self) -> int:
        request_id = next(self._request_ids)
        with self._lock:
            self.num_requests = max(self.num_requests, request_id + 1)
        return request_id

    def _tokenize(self, prompt: Prompt, template_arguments: Mapping) -> tuple[str | None, list[int]]:
        """A prompt as text, if it came so, and as ids."""
        if not isinstance(template_arguments, Mapping):
            raise TypeError(f"chat_template_kwargs={template_arguments!r:.80}: must be a dict")
        if is_conversation(prompt):
            with self._lock:
                text = render_chat(self.tokenizer, prompt, template_arguments)
            prompt = {"prompt": text, "prompt_token_ids": self._encode(text, add_special_tokens=False)}
        text, ids = prompt if isinstance(prompt, str) else None, prompt
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            is_known = not prompt.keys() - {"prompt", "prompt_token_ids"} and not isinstance(ids, str)
            if not isinstance(text, str | None) or (text is None and ids is None) or not is_known:
                raise TypeError(
                    f"prompt={prompt!r:.80}: a dict must have 'prompt' (text) or 'prompt_token_ids', and no more"
                )
            ids = text if ids is None else ids
        ids = self._encode(ids) if isinstance(ids, str) else as_list(ids)
        kinds = None if ids is None else set(map(type, ids))
        if kinds is None or any(kind is bool or not issubclass(kind, Integral) for kind in kinds):
            raise TypeError(f"prompt={prompt!r:.80}: must be {KINDS}")
        if not ids:
            raise ValueError("prompt: is empty; it must hold at least 1 token")
        if len(ids) >= self.config.max_model_len:
            bound = self.config.max_model_len
            raise ValueError(f"prompt: has {len(ids)} tokens; it must be shorter than max_model_len={bound}")
        vocab_size = self.config.model_config.vocab_size
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"prompt: token id {token_id} is outside of the vocabulary (0 to {vocab_size - 1})")
        return text, ids if kinds == {int} else [int(i) for i in ids]

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt={text!r:.80}: character {error.start} is a lone surrogate, which is no text"
            ) from None
        with self._lock:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _noise_seed(self, params: SamplingParams, request_id: int) -> int:
        if params.seed is not None:
            return params.seed
        if self.config.seed is not None:
            return xxhash.xxh3_64_intdigest(struct.pack("<QQ", self.config.seed, request_id))
        return secrets.randbits(64)
