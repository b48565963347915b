"""Determines the formats of a model's reasoning and tool calls.

The formats come from the settings and the chat template.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from nanovllm.reasoning.formats import format_of, has_unknown_reasoning, template_text
from nanovllm.reasoning.harmony import HarmonyMarkers
from nanovllm.reasoning.reasoning_feature import markers_of
from nanovllm.reasoning.stage import Markers
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.serve.errors import require
from nanovllm.serve.protocol import ChatBody, GenerationBody
from nanovllm.serve.settings import ServerSettings
from nanovllm.serve.tool_parsers import PARSERS, parser_for

logger = logging.getLogger("nanovllm")


class Formats(NamedTuple):
    """The formats in which a model writes its answers.

    tool_calls: the name of the tool-call format in PARSERS; `None` if unknown.
    reasoning_parser: the name of the reasoning format; `None` if reasoning stays in the content.
    reasoning: the markers of the reasoning format.
    special: the markers that are special tokens; by default, generated text omits special tokens.
    token_bytes: the bytes of each token id. Log-probabilities show bytes, because a token may end within a character.
    """

    tool_calls: str | None
    reasoning_parser: str | None = None
    reasoning: Markers | HarmonyMarkers | None = None
    special: frozenset[str] = frozenset()
    token_bytes: Mapping[int, bytes] = MappingProxyType({})

    def chat_params(self, body: ChatBody, has_structure: bool) -> dict[str, Any]:
        """Return the sampling parameters that a conversation needs for its reasoning and tool calls.

        Raises ApiError if tool calls are allowed, but their format is unknown.
        """
        is_known = self.tool_calls is not None or not body.tools or body.tool_choice not in (None, "auto")
        require(is_known, "tools: the format of this model's calls is unknown: see --tool-call-parser")
        params = self.budget_params(body)
        if self.reasoning_parser is not None and (has_structure or body.stop):  # other requests need no parser
            params["reasoning_parser"] = self.reasoning_parser
        if self.special and (body.tools or self.reasoning is not None):
            params["skip_special_tokens"] = False
        return params

    def budget_params(self, body: GenerationBody) -> dict[str, Any]:
        """Return the sampling parameters that a reasoning budget needs.

        Raises ApiError if the reasoning format is unknown.
        """
        if (budget := body.thinking_token_budget) in (None, -1):
            return {}
        problem = f"thinking_token_budget={budget}: this model's reasoning format is unknown: see --reasoning-parser"
        return {"reasoning_parser": require(self.reasoning_parser, problem)}


def find_formats(processor: InputProcessor, settings: ServerSettings) -> Formats:
    """Return the formats, and log them.

    If the settings do not define a format, the chat template defines it.
    """
    tokenizer = processor.tokenizer
    is_chat = processor.config.task == "generate"
    template = template_text(getattr(tokenizer, "chat_template", None)) if is_chat else ""
    tools: str | None = settings.tool_call_parser
    reasoning: str | None = settings.reasoning_parser
    if tools == "auto":
        tools = parser_for(template)
        if tools is None and "tools" in template:
            logger.warning("the chat template has tools, in a format that is unknown here: set --tool-call-parser")
    if reasoning == "auto":
        reasoning = format_of(template)
        if has_unknown_reasoning(template):
            logger.warning("the chat template has reasoning, in a format that is unknown here: set --reasoning-parser")
    reasoning = None if reasoning == "none" else reasoning
    text = "formats of the chat template: tool calls %s; reasoning %s"
    if is_chat:
        logger.info(text, tools or "none (requests with `tools` are refused)", reasoning or "none")
    markers = None if reasoning is None else markers_of(reasoning, processor)
    names = [*PARSERS[tools or "none"].markers, *(markers.texts if markers else ())]
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return Formats(tools, reasoning, markers, frozenset(names) & special, processor.all_token_bytes)
