"""What a request says about the structure of its answer, as `SamplingParams.structured_outputs`."""

from typing import Any

from nanovllm.serve.errors import ApiError, require
from nanovllm.serve.protocol import ChatBody, GenerationBody, NamedToolChoice, Tool


def structured_outputs(body: GenerationBody) -> dict[str, Any] | None:
    """None if any text will do. ApiError for a request that states two structures, or one in an incomplete way."""
    found = _structures(body)
    if len(found) > 1:
        first, second, *_ = found
        raise ApiError(400, f"{second}: can't be combined with {first}", second)
    return next(iter(found.values()), None)


def with_own_field(error: ApiError, body: GenerationBody) -> ApiError:
    """An error of `structured_outputs` is one of the field that stated the structure, by the name that it has there."""
    if error.param == "structured_outputs" and (found := _structures(body)):
        field = next(iter(found))
        error.rename({"structured_outputs": "tools" if field == "tool_choice" else field})
    error.rename(body.own_names)
    return error


def _structures(body: GenerationBody) -> dict[str, dict[str, Any]]:
    """The structures of the answer, by the names of the fields that state them."""
    calls = _of_tool_choice(body) if isinstance(body, ChatBody) else None
    found = {"structured_outputs": body.structured_outputs}
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found[f"guided_{kind}"] = {kind: value}
    # if a call is required, there is no text to format
    found |= {"response_format": _of_response_format(body) if calls is None else None, "tool_choice": calls}
    return {name: value for name, value in found.items() if value is not None}


def _of_response_format(body: GenerationBody) -> dict[str, Any] | None:
    if (wanted := body.response_format) is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    schema = require(wanted.json_schema, "response_format: the type 'json_schema' needs a json_schema")
    return {"json": schema.schema_}


def _of_tool_choice(body: ChatBody) -> dict[str, Any] | None:
    """A list of calls for "required", the arguments for a function that is named; see WholeParser."""
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
    """With `uri` as the `$id` of its parameters, a reference of theirs, such as `#/$defs/Item`, stays within them."""
    # the whole schema has one draft, the newest: before 2019-09, a `$ref` hides the `$id` beside it
    parameters = {name: value for name, value in _parameters(tool).items() if name != "$schema"} | {"$id": uri}
    properties = {"name": {"const": tool.function.name}, "parameters": parameters}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
