"""Makes `SamplingParams.structured_outputs` from the request fields that define the structure of an answer."""

from typing import Any

from nanovllm.serve.errors import ApiError, require
from nanovllm.serve.protocol import ChatBody, GenerationBody, NamedToolChoice, Tool


def structured_outputs(body: GenerationBody) -> dict[str, Any] | None:
    """Return the answer's structure, or None for free text.

    Raises ApiError if there are two structures, or if the structure is incomplete.
    """
    structures = _structures(body)
    if len(structures) > 1:
        first, second, *_ = structures
        raise ApiError(400, f"{second}: can't be combined with {first}", second)
    return next(iter(structures.values()), None)


def with_own_field(error: ApiError, body: GenerationBody) -> ApiError:
    """Change an error, so that it names the field that the client sent, such as `response_format`."""
    if error.param == "structured_outputs" and (structures := _structures(body)):
        field = next(iter(structures))
        error.rename({"structured_outputs": "tools" if field == "tool_choice" else field})
    error.rename(body.own_names)
    return error


def _structures(body: GenerationBody) -> dict[str, dict[str, Any]]:
    """Return the structures that the request defines for the answer, in a dict by field name."""
    calls = _of_tool_choice(body) if isinstance(body, ChatBody) else None
    structures = {"structured_outputs": body.structured_outputs}
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            structures[f"guided_{kind}"] = {kind: value}
    # if a call is required, the answer has no text to format
    structures |= {"response_format": _of_response_format(body) if calls is None else None, "tool_choice": calls}
    return {name: value for name, value in structures.items() if value is not None}


def _of_response_format(body: GenerationBody) -> dict[str, Any] | None:
    if (response_format := body.response_format) is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"json_object": True}
    schema = require(response_format.json_schema, "response_format: the type 'json_schema' needs a json_schema")
    return {"json": schema.schema_}


def _of_tool_choice(body: ChatBody) -> dict[str, Any] | None:
    """If `tool_choice` forces a call, return the answer's schema, else None. WholeParser parses a forced call."""
    if body.tool_choice in (None, "none"):
        return None
    tools = require(body.tools, "tool_choice: there are no tools")
    if body.tool_choice == "auto":
        return None
    if isinstance(body.tool_choice, NamedToolChoice):
        name = body.tool_choice.function.name
        chosen = next((tool for tool in tools if tool.function.name == name), None)
        return {"json": _parameters(require(chosen, f"tool_choice: there is no tool {name!r:.80}"))}
    items = {"anyOf": [_call_schema(tool, f"https://tool.invalid/{i}") for i, tool in enumerate(tools)]}
    calls = {"type": "array", "minItems": 1, "items": items}
    if body.parallel_tool_calls is False:
        calls["maxItems"] = 1
    return {"json": calls}


def _call_schema(tool: Tool, uri: str) -> dict[str, Any]:
    """Return the schema of a call.

    uri: the `$id` of the parameters' schema. Because of this `$id`, a reference such as `#/$defs/Item` is looked up in
        the parameters' schema, and not in the schema of the whole call.
    """
    # without $schema, the newest draft applies; in drafts before 2019-09, a `$ref` would hide the `$id` next to it
    parameters = {name: value for name, value in _parameters(tool).items() if name != "$schema"} | {"$id": uri}
    properties = {"name": {"const": tool.function.name}, "parameters": parameters}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
