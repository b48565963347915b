"""Implements the commands `nanovllm generate` and `nanovllm chat`, with their flags."""

import argparse
import os
import sys
from dataclasses import replace
from typing import Any

from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.flags import add_flags, given
from nanovllm.utils.libraries import import_libraries
from nanovllm.utils.model_files import check_model

CHAT_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "skip_special_tokens"),
)
NO_ENGINE_FLAGS = ("model", "seed")  # here, --seed is the seed of the sampling


def _add_settings(parser: argparse.ArgumentParser, sampling: tuple[str, ...], is_chat: bool) -> None:
    skip = {name for name in SamplingParams.__dataclass_fields__ if name not in sampling}
    title = "sampling (the model's own recommendations override these defaults)"
    defaults = {"max_tokens": "as long as the context"} if is_chat else {}
    add_flags(parser, SamplingParams, title, skip=skip, defaults=defaults)
    add_flags(parser, Config, "engine", skip=NO_ENGINE_FLAGS)


def add_flags_of(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate` or `chat` that follow MODEL."""
    if name == "generate":
        parser.set_defaults(run=generate)
        parser.add_argument("prompt", metavar="PROMPT", help="the prompt, or - to read it from the standard input")
        text = "send the prompt as a user message (default: if the model has a chat template)"
        parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help=text)
        _add_settings(parser, (*CHAT_SAMPLING, "n"), is_chat=False)
        return
    parser.set_defaults(run=chat)
    text = "chat with the server at this address; MODEL is a name that it lists, by default the first one"
    parser.add_argument("--url", metavar="URL", help=text)
    text = "the key of that server (default: the environment variable NANOVLLM_API_KEY or OPENAI_API_KEY)"
    parser.add_argument("--api-key", metavar="KEY", help=text)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    _add_settings(parser, CHAT_SAMPLING, is_chat=True)


def _load(options: argparse.Namespace) -> Any:
    SamplingParams(**given(options, SamplingParams))  # raises errors before the model is loaded
    settings = given(options, Config, skip=NO_ENGINE_FLAGS)
    check_model(options.model, settings.get("revision"))
    import_libraries(settings)
    from nanovllm import LLM

    return LLM(options.model, **settings)


def generate(options: argparse.Namespace) -> int:
    from nanovllm.serve.terminal.conversation import Answer
    from nanovllm.serve.terminal.lines import write
    from nanovllm.serve.terminal.sources import Piece

    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    with _load(options) as llm:
        is_chat = llm.tokenizer.chat_template is not None if options.chat is None else options.chat
        prompt = [{"role": "user", "content": text}] if is_chat else text
        params = replace(llm.get_default_sampling_params(), **given(options, SamplingParams))
        if params.n == 1:
            shown = Answer()
            for event in llm.stream(prompt, params):
                shown.add(Piece(event.text, "", shown.num_tokens + len(event.token_ids), event.finish_reason))
            shown.close()
        else:
            for answer in llm.generate(prompt, params, use_tqdm=False)[0].outputs:
                print(f"--- {answer.index + 1} of {params.n}\n{answer.text}", flush=True)
                is_empty = "" if answer.text.strip() else "no text, "
                note = f"[{len(answer.token_ids)} tokens, {is_empty}finish reason: {answer.finish_reason}]\n"
                write(note, sys.stderr, is_dim=True)
    return 0


def chat(options: argparse.Namespace) -> int:
    if options.model is None and options.url is None:
        raise ValueError("needs a MODEL, or the --url of a server")
    from nanovllm.serve.terminal.conversation import Conversation
    from nanovllm.serve.terminal.sources import LocalModel, Server

    params = given(options, SamplingParams)
    if options.url is not None:
        if settings := given(options, Config, skip=NO_ENGINE_FLAGS):
            raise ValueError(f"{', '.join(settings)}: set an engine option, but --url is a running server")
        keys = (options.api_key, os.environ.get("NANOVLLM_API_KEY"), os.environ.get("OPENAI_API_KEY"))
        server = Server(options.url, options.model, next(filter(None, keys), None))
        return Conversation(server, params, CHAT_SAMPLING, options.system).run()
    with _load(options) as llm:
        return Conversation(LocalModel(llm, options.model), params, CHAT_SAMPLING, options.system).run()
