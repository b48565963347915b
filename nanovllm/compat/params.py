"""Checks vLLM's request parameters, and translates them to nano-vllm's parameters."""

import json
from dataclasses import fields
from enum import Enum
from numbers import Real
from typing import Any

import nanovllm.sampling_params as ours
from nanovllm.compat.vllm_settings import select
from nanovllm.features import beam_params
from nanovllm.structured_outputs.spec import check_spec
from nanovllm.utils.checks import check_bool

# parameters that only vLLM's SamplingParams has, and the values (or types of values) that change nothing here
ACCEPTED: dict[str, tuple] = {
    "best_of": (None,),
    "early_stopping": (False,),
    "extra_args": (None, {}),
    "length_penalty": (1.0, 1),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "output_kind": (Enum,),  # `generate` returns complete answers in any case
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (bool,),
    "skip_reading_prefix_cache": (None, False),
    "spaces_between_special_tokens": (bool,),  # no supported tokenizer writes such spaces
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (False,),
}
BEAM_ACCEPTED: dict[str, tuple] = {
    "include_stop_str_in_output": (bool,),
    "structured_outputs": (None,),
    "temperature": (Real,),  # beams are compared by raw log-probabilities
}
FORMS = ("json", "regex", "choice", "grammar", "json_object")  # forms of an answer
RESTRICTIONS = ("disable_any_whitespace", "disable_additional_properties")  # of a JSON schema
FORM_OPTIONS: dict[str, tuple] = {
    "backend": (None, str),  # llguidance makes the masks in any case
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    **dict.fromkeys(RESTRICTIONS, (bool,)),
}


def restricted_schema(schema: Any, disable_any_whitespace: bool, disable_additional_properties: bool) -> Any:
    """Restrict a JSON schema: forbid white space between elements, additional properties, or both.

    Raises the same errors as `SamplingParams` for an invalid schema.
    """
    if not (disable_any_whitespace or disable_additional_properties):
        return schema
    schema = json.loads(check_spec({"json": schema}, ignore_eos=False)["json"])
    schema = _closed(schema) if disable_additional_properties else schema
    return {**schema, "x-guidance": {"whitespace_pattern": ""}} if disable_any_whitespace else schema


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if schema.get("type") == "object" else {}
    return closed | {name: _closed(part) for name, part in schema.items()}


class RequestOutputKind(Enum):
    """What a streamed output contains: the answer so far, its new part, or nothing until the answer is complete."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(dict):
    """A dict for `SamplingParams.structured_outputs`, with the same attributes as vLLM's StructuredOutputsParams."""

    def __init__(self, **options: Any):
        """Accept one of `json`, `regex`, `choice`, `grammar` and `json_object`, plus vLLM's other options.

        Raises TypeError for an unknown option, and ValueError for an option that is not supported. `SamplingParams`
        checks the values.
        """
        forms = select("option of structured outputs", options, FORMS, FORM_OPTIONS)
        if forms.get("json") is not None:
            forms["json"] = restricted_schema(forms["json"], *(options.get(name, False) for name in RESTRICTIONS))
        super().__init__({name: form for name, form in forms.items() if form is not None})

    def __getattr__(self, name: str) -> Any:
        if name not in FORMS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.get(name)


class FlatLogprobs(list):
    """The log-probabilities of a request that sets `flat_logprobs`: a list with one dict per token."""


class SamplingParams(ours.SamplingParams):
    """nano-vllm's SamplingParams with vLLM's names and vLLM's default for `max_tokens`.

    As in vLLM, a SamplingParams object is mutable.
    """

    flat_logprobs = False

    def __init__(self, **params: Any):
        """Raises ValueError for a value that is not supported, and TypeError for an unknown name."""
        if (form := params.pop("guided_decoding", None)) is not None:  # the name until vLLM 0.11
            if params.get("structured_outputs") is not None:
                raise TypeError(
                    f"guided_decoding={form!r:.80}: is another name for 'structured_outputs', which is given too"
                )
            params["structured_outputs"] = form
        if isinstance(seed := params.get("seed"), int) and -(2**63) <= seed < -1:
            params["seed"] = seed % 2**64  # vLLM's seeds are signed
        check_bool("flat_logprobs", flat_logprobs := params.pop("flat_logprobs", False))
        names = [field.name for field in fields(ours.SamplingParams)]
        super().__init__(**{"max_tokens": 16} | select("parameter", params, names, ACCEPTED))
        object.__setattr__(self, "flat_logprobs", flat_logprobs)

    def __setattr__(self, name: str, value: Any) -> None:
        current = {known: getattr(self, known) for known in (*(field.name for field in fields(self)), "flat_logprobs")}
        changed = type(self)(**current | {name: value})
        for field in current:
            object.__setattr__(self, field, getattr(changed, field))


class BeamSearchParams(beam_params.BeamSearchParams):
    def __init__(self, beam_width: int, max_tokens: int, ignore_eos: bool = False, **params: Any):
        """Raises the same errors as `SamplingParams`."""
        params = select("parameter", params, ("length_penalty",), BEAM_ACCEPTED)
        super().__init__(beam_width, max_tokens, ignore_eos=ignore_eos, **params)
