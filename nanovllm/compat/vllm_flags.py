"""Translates command lines of `vllm serve` to the flags of `nanovllm serve`."""

import json
from collections.abc import Container, Iterable
from numbers import Real
from typing import Any

from nanovllm.compat.vllm_settings import ALIASES, VLLM_SETTINGS, check_accepted

SHORT = {"-tp": "tensor-parallel-size", "-dp": "data-parallel-size", "-pp": "pipeline-parallel-size"}
SHORT |= {"-q": "quantization", "-ep": "enable-expert-parallel", "-O": "optimization-level"}
# flags of vLLM's server, and the values (or types of values) that change nothing here
ACCEPTED: dict[str, tuple] = {
    # these flags concern log output, or ask for something that this server always does
    "disable_fastapi_docs disable_frontend_multiprocessing disable_uvicorn_access_log enable_auto_tool_choice": (bool,),
    "enable_log_deltas enable_log_outputs enable_prompt_tokens_details enable_reasoning": (bool,),
    "enable_server_load_tracking exclude_tools_when_tool_choice_none log_error_stack": (bool,),
    "allow_credentials enable_offline_docs enable_per_request_metrics enable_request_id_headers": (False,),
    "enable_ssl_refresh enable_tokenizer_info_endpoint headless tokens_only": (False,),
    "h11_max_header_count h11_max_incomplete_event_size max_log_len": (Real,),
    "disable_access_log_for_endpoints fingerprint_mode guided_decoding_backend uvicorn_log_level": (str,),
    "chat_template_content_format": ("auto",),
    "response_role": ("assistant",),
    "allowed_headers allowed_methods": (["*"],),
}
SERVER_FLAGS = {name: accepted for names, accepted in ACCEPTED.items() for name in names.split()}


def translate_flags(arguments: Iterable[str], known: Container[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into the arguments for nano-vllm's parser and the settings of vLLM's engine.

    nano-vllm's flags, whose names are in `known`, go to nano-vllm's parser. Unknown flags also go to nano-vllm's
    parser, which reports them as errors. Raises ValueError if a flag of vLLM's server has an unsupported value.
    """
    remaining, own_arguments, model, settings = [*arguments], list[str](), list[str](), dict[str, Any]()
    while remaining:
        flag, separator, value = _long(remaining.pop(0)).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_on = not name.startswith("no_")
        name = name.removeprefix("no_")
        accepted = SERVER_FLAGS.get(name, VLLM_SETTINGS.get(name))
        if flag == "--model" and (separator or remaining):
            model = [value if separator else remaining.pop(0)]
        elif not flag.startswith("--") or name in known or (accepted is None and name not in ALIASES):
            own_arguments.append(flag + separator + value)
        else:
            has_no_value = name.startswith("enable_") or any(x is bool or isinstance(x, bool) for x in accepted or ())
            if not has_no_value and not separator and remaining:
                value = remaining.pop(0)
            settings[name] = is_on if has_no_value and not separator else _value(value)
            if name in SERVER_FLAGS:
                check_accepted(name, settings.pop(name), SERVER_FLAGS[name])
    return own_arguments + model, settings


def _long(argument: str) -> str:
    if argument.startswith("--"):
        flag, separator, value = argument.partition("=")
        return flag.replace("_", "-") + separator + value
    if argument.startswith("-O") and argument[2:].isdigit():
        return f"--optimization-level={argument[2:]}"
    return f"--{SHORT[argument]}" if argument in SHORT else argument


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None if text in ("None", "none") else text
