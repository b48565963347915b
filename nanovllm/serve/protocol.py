"""The bodies of requests to the HTTP API: OpenAI's fields, and vLLM's in addition. Any other field is an error.

Checks of a body run in the event loop, so their time is bounded: a list ends with its first wrong item, a dict of any
size has no checks of its own, and only the first unknown field is reported. Without that, two megabytes of wrong items
are a million errors, which take seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nanovllm.sampling_params import MAX_BAD_WORDS, SamplingParams

MAX_STOPS = 64  # strings that are looked for at every token
MAX_STOP_CHARACTERS = 1024
MAX_TOOLS = 128  # OpenAI's bound
MAX_MESSAGES = 10_000  # of a conversation; also parts of a message
MAX_LOGIT_BIASES = 300  # OpenAI's bound, and SamplingParams'
MAX_LOGPROBS = 20  # of a token, as OpenAI has it; the engine's own bound applies as well
# fields of a body that are passed on to SamplingParams as they are
SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "max_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "bad_words", "allowed_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)


String = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, body: Any) -> Any:
        """Each would be an error, and one is enough to refuse the body."""
        known = cls.model_fields.keys()
        if not isinstance(body, dict) or body.keys() <= known:
            return body
        first = next(name for name in body if name not in known)
        return {name: value for name, value in body.items() if name in known or name == first}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding against eavesdroppers; there is none here


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)  # "name", "strict" and "description" change nothing

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Body):
    """What both ways to generate have in common. None is the model's or the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = Field(None, ge=1)
    seed: int | None = None
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
    structured_outputs: dict[str, Any] | None = None  # vLLM's
    # these change nothing here, and clients send them
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_usage_everywhere(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        is_single = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return [self.prompt] if is_single else list(self.prompt)  # type: ignore[list-item, arg-type]


class Function(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class ToolName(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str


class NamedToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: ToolName


class Message(BaseModel):
    """A chat template may read further entries."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class ChatFields(BaseModel):
    """What makes the prompt of a conversation."""

    messages: list[Message] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(ChatFields, GenerationBody):
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(Body):
    prompt: str


class TokenizeChatBody(ChatFields, Body):
    pass


class DetokenizeBody(Body):
    tokens: TokenIds


def sampling_params(
    body: GenerationBody, defaults: dict[str, Any], structured_outputs: dict[str, Any] | None, **special: Any
) -> SamplingParams:
    """The parameters of a request: `special`, else the body's own, else `defaults`. Errors are SamplingParams'."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if structured_outputs is not None:
        given["structured_outputs"] = structured_outputs
    return SamplingParams(**defaults | given | special)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise ValueError(f"logit_bias: key {key!r:.80} must be a token id")
    return int(key)
