"""Defines the request bodies of the HTTP API, with OpenAI's and vLLM's fields. Other fields are ignored.

Bodies are checked in the event loop, so the time of a check must be bounded. For example, two megabytes of wrong items
would produce a million errors, which take seconds. Therefore, only the first wrong item of a list is reported, and this
module does not check the contents of large dicts.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from prometheus_client import Counter
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nanovllm.features.beam_params import BeamSearchParams
from nanovllm.features.logit_edits import MAX_BAD_WORDS
from nanovllm.sampling_params import MAX_INT, SamplingParams
from nanovllm.serve.errors import body_error, require

logger = logging.getLogger("nanovllm")

MAX_STOPS = 64  # stop strings, which are searched for at every token
MAX_STOP_CHARACTERS = 1024
MAX_TOOLS = 128  # OpenAI's bound
MAX_MESSAGES = 10_000  # the most messages of a conversation, and the most parts of a message
MAX_LOGIT_BIASES = 300  # the bound of OpenAI and of SamplingParams
MAX_LOGGED_NAMES = 100  # names of unknown fields

String = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Dicts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)]
ToolDicts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)]


class IgnoredFields:
    """Counts the unknown fields of all bodies, and logs each name once, up to MAX_LOGGED_NAMES names."""

    def __init__(self) -> None:
        self.count = Counter("nanovllm:ignored_request_fields", "Unknown fields of requests", registry=None)
        self._logged = set[str]()

    def add(self, names: Collection[str]) -> None:
        self.count.inc(len(names))
        if new := {name[:80] for name in islice(names, MAX_LOGGED_NAMES - len(self._logged))} - self._logged:
            self._logged |= new
            logger.warning("fields of requests that are unknown here, and are ignored: %s", sorted(new))


IGNORED = IgnoredFields()


def only(*allowed: Any) -> AfterValidator:
    """Make a validator for a field that has no effect in this server. The field must be `null` or one of `allowed`."""

    def check(value: Any) -> Any:
        if value not in allowed:
            values = " or ".join(["null", *map(repr, allowed)])
            raise PydanticCustomError("unsupported", "is not supported here, and must be {values}", {"values": values})
        return value

    return AfterValidator(check)


class Item(BaseModel):
    """A part of a request body. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class Body(Item):
    """A request body. A field that is `null` gets its default."""

    # the client's names of parameters and translated fields, if they differ from ours
    own_names: ClassVar[Mapping[str, str]] = {}

    # for these fields, `as_sent` returns the client's value, with unknown keys and in the client's order
    kept_fields: ClassVar[tuple[str, ...]] = ()

    model: str | None = None
    _kept: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    def as_sent(self, name: str) -> Any:
        """Return the value that the client sent for one of the `kept_fields`, or `None`."""
        assert name in self.kept_fields, name
        return self._kept.get(name)

    @model_validator(mode="wrap")
    @classmethod
    def _ignore_unknown_fields(cls, body: Any, check: Callable[[Any], "Body"]) -> "Body":
        if not isinstance(body, dict):
            return check(body)
        fields = cls.model_fields
        checked = check({name: value for name, value in body.items() if value is not None and name in fields})
        checked._kept = {name: body.get(name) for name in cls.kept_fields}
        if unknown := body.keys() - fields.keys():
            IGNORED.add(unknown)
        return checked


class StreamOptions(Item):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Item):
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Item):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextBody(Body):
    """The fields that control how the text of a body is tokenized."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] = "left"


class GenerationBody(TextBody):
    """The fields that completion and chat requests share. `None` selects the default of the model or the engine."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: String | Annotated[list[String], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: TokenIds | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[String], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    logprobs: int | bool | None = None  # see the subclasses
    priority: int = 0
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None  # an extension of vLLM
    guided_json: dict[str, Any] | str | None = None  # these four fields are vLLM's older forms of structured_outputs
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = Field(None, ge=-1)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None  # for beam search
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # clients send these fields, which change nothing here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    spaces_between_special_tokens: bool | None = None  # the text never has such spaces
    thinking_token_budget: int | None = Field(None, ge=-1)
    # this field would change the answer, and is not supported
    logprob_token_ids: Annotated[Any, only([])] = None


class CompletionBody(GenerationBody):
    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: int | None = Field(None, ge=-1)
    echo: bool | None = None
    best_of: int | None = None
    suffix: Annotated[Any, only("")] = None

    def prompts(self) -> list[str | list[int]]:
        is_single = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return [self.prompt] if is_single else list(self.prompt)  # type: ignore[list-item, arg-type]


class Function(Item):
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    parameters: dict[str, Any] | None = None


class Tool(Item):
    type: Literal["function"]
    function: Function


class ToolName(Item):
    name: str


class NamedToolChoice(Item):
    type: Literal["function"]
    function: ToolName


class Message(Item):
    role: str
    content: str | Dicts | None = None
    tool_calls: ToolDicts | None = None
    function_call: dict[str, Any] | None = None  # OpenAI's older form of a call
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name of `reasoning`


class ChatFields(TextBody):
    """The fields that make up the prompt of a conversation."""

    kept_fields: ClassVar[tuple[str, ...]] = ("messages", "tools")

    messages: list[Message] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    tools: Annotated[list[Tool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    documents: Dicts | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # an extension of vLLM: min_pixels, max_pixels
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ChatBody(ChatFields, GenerationBody):
    own_names = {"logprobs": "top_logprobs"}
    kept_fields: ClassVar = (*ChatFields.kept_fields, "functions")

    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool | Literal[0, 1] | None = None
    top_logprobs: int | None = Field(None, ge=-1)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | ToolName | None = None
    echo: bool | None = None
    include_reasoning: bool = True
    verbosity: Literal["low", "medium", "high"] | None = None  # changes nothing here
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    audio: Annotated[Any, only()] = None

    @model_validator(mode="after")
    def _use_functions_as_tools(self) -> "ChatBody":
        """Convert `functions`, OpenAI's older form of tools."""
        if self.functions is not None:
            tools = [Tool(type="function", function=function) for function in self.functions]
            self.tools = [*(self.tools or ()), *tools]
            call, self.parallel_tool_calls = self.function_call, False
            self.tool_choice = NamedToolChoice(type="function", function=call) if isinstance(call, ToolName) else call
        return self


def translated(form: type[ChatBody], fields: dict[str, Any]) -> ChatBody:
    """Translate another endpoint's body to a chat body. Error messages use the other endpoint's field names."""
    try:
        return form.model_validate(fields)
    except ValidationError as validation_error:
        error = body_error(validation_error)
        error.rename(form.own_names)
        raise error from None


class TokenizeBody(TextBody):
    prompt: str
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatFields):
    return_token_strs: bool | None = None


# the discriminator selects one body, so that errors describe this body only; error messages leave out tags ("...Body")
AnyTokenizeBody = Annotated[
    Annotated[TokenizeBody, Tag("TokenizeBody")] | Annotated[TokenizeChatBody, Tag("TokenizeChatBody")],
    Discriminator(lambda body: "TokenizeChatBody" if isinstance(body, dict) and "messages" in body else "TokenizeBody"),
]


class DetokenizeBody(Body):
    tokens: TokenIds


def sampling_params(
    body: GenerationBody, defaults: dict[str, Any], structured_outputs: dict[str, Any] | None, **special: Any
) -> SamplingParams:
    """Return the SamplingParams of a request.

    Each parameter comes from `special`, else from the body, else from `defaults`. `special` contains parameters that
    endpoints define differently, such as `logprobs`. Raises the same errors as SamplingParams.
    """
    names = SamplingParams.__dataclass_fields__
    sent = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    if body.logit_bias:
        if wrong := [key for key in body.logit_bias if not re.fullmatch("[0-9]{1,19}", key)]:
            raise ValueError(f"logit_bias: the keys {wrong!r:.160} must be token ids")
        sent["logit_bias"] = {int(key): bias for key, bias in body.logit_bias.items()}
    if body.seed is not None and body.seed < -1:  # as in vLLM, -1 means no seed
        sent["seed"] = body.seed % 2**64
    if structured_outputs is not None:
        sent["structured_outputs"] = structured_outputs
    return SamplingParams(**defaults | sent | special)


def beam_search_params(body: GenerationBody, params: SamplingParams, max_model_len: int) -> BeamSearchParams:
    """Return the parameters of a beam search with `n` beams.

    Raises ApiError if beam search does not support an option.
    """
    unsupported = {name: getattr(params, name) for name in ("logprobs", "prompt_logprobs", "structured_outputs")}
    unsupported |= {"stream": body.stream or None, "stop": params.stop or None, "cache_salt": body.cache_salt}
    for name, value in unsupported.items():
        require(value is None, f"use_beam_search: can't be combined with {name}")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return BeamSearchParams(params.n, params.max_tokens or max_model_len, penalty, params.ignore_eos)
