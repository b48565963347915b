"""The command line: `nanovllm COMMAND ...`."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from socket import socket
from typing import TYPE_CHECKING, Any, NoReturn

import nanovllm
from nanovllm.compat.vllm_flags import translate_flags
from nanovllm.compat.vllm_settings import translate
from nanovllm.config import Config
from nanovllm.serve.address import announce, reserved_address
from nanovllm.serve.process import set_up_process
from nanovllm.serve.settings import ServerSettings
from nanovllm.utils.flags import HelpFormatter, Parser, add_flags, given
from nanovllm.utils.libraries import import_libraries
from nanovllm.utils.model_files import check_model
from nanovllm.utils.waiting import waiting_for

if TYPE_CHECKING:
    from nanovllm.serve.engine_client import EngineClient

COMMANDS = {
    "serve": "Serve a model with OpenAI's HTTP API, at http://127.0.0.1:8000 unless told otherwise.",
    "generate": "Print a model's answer to a prompt while it is generated.",
    "chat": "Talk to a model in the terminal, in several turns.",
    "bench": "Measure throughput and latency; `nanovllm bench --help` lists the workloads and arguments.",
    "show-fused": "List the modules of a model that have a fused form on CUDA, and measure what groups of them save.",
    "completion": "Print a script by which bash, zsh or fish completes commands and flags.",
}
SERVER_PACKAGES = "fastapi", "pydantic", "uvicorn", "httptools", "prometheus_client", "msgspec"
SMALL_CACHE = {"kvcache_block_size": 16, "num_kvcache_blocks": 200}  # the cache of the bundled model
SMALL_CACHE_MESSAGE = (
    "the bundled model gets a small cache (%s blocks of %s tokens), so that the web page shows shared blocks and "
    "preemptions with a few chats; --num-kvcache-blocks and --kvcache-block-size set another size"
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and exit with the command's status.

    The status 2 means that the command line or a setting is invalid.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and arguments[0] == "bench":  # this command parses its arguments itself
            from nanovllm.benchmarks.command import main as bench

            bench(arguments[1:], prog="nanovllm bench")
            sys.exit(0)
        options = parse(arguments)
        try:
            sys.exit(options.run(options))
        except (ValueError, TypeError, OSError, ImportError) as error:
            print(f"nanovllm {options.command}: error: {error}", file=sys.stderr)
            sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. For the command `serve`, the engine flags that only vLLM has go to `vllm_settings`."""
    chosen = next((argument for argument in arguments if argument in COMMANDS), None)
    parser, commands = make_parser()
    if chosen is not None:
        add_flags_of(chosen, commands[chosen])
    if not arguments or arguments[0] != "serve":
        return parser.parse_args(arguments)

    try:
        known = Config.__dataclass_fields__ | ServerSettings.__dataclass_fields__
        remaining, settings = translate_flags(arguments[1:], known)
    except ValueError as error:
        commands["serve"].error(str(error))
    return parser.parse_args(["serve", *remaining], argparse.Namespace(vllm_settings=settings))


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the main parser, and a parser for each command.

    The function `parse` adds the flags of the chosen command later.
    """
    parser = Parser("nanovllm", description="LLM inference: an HTTP server, or answers right here.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {nanovllm.__version__}")
    group = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    formatter = partial(HelpFormatter, max_help_position=32, width=110)
    commands = {
        name: group.add_parser(name, help=text, description=text, formatter_class=formatter)
        for name, text in COMMANDS.items()
    }
    return parser, commands


def add_flags_of(name: str, command: Parser) -> None:
    """Add the arguments of a command, and set `run` to the function that runs the command."""
    if name == "completion":
        from nanovllm.serve.terminal import completion

        completion.add_arguments(command, complete_parsers)
    elif name != "bench":  # bench has a separate parser
        text = "a folder in the Hugging Face layout, a hub id, or tiny-qwen3, which is part of this package"
        command.add_argument("model", metavar="MODEL", help=text, nargs="?" if name == "chat" else None)
        if name == "serve":
            add_serve_flags(command)
        elif name == "show-fused":
            from nanovllm.benchmarks import fused

            fused.add_arguments(command)
        else:
            from nanovllm.serve.terminal import commands

            commands.add_flags_of(name, command)


def complete_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return one parser per command, with all flags of the command."""
    from nanovllm.benchmarks.arguments import make_parser as make_bench_parser

    _, commands = make_parser()
    for name, command in commands.items():
        add_flags_of(name, command)
    return {**commands, "bench": make_bench_parser()}


def add_serve_flags(command: Parser) -> None:
    command.set_defaults(run=serve)
    add_flags(command, ServerSettings, "server", several=("served_model_name", "lora_modules"))
    add_flags(command, Config, "engine", skip=("model",))


def serve(options: argparse.Namespace) -> int:
    if missing := [name for name in SERVER_PACKAGES if find_spec(name) is None]:
        raise ImportError(f"{missing[0]} is not installed; pip install 'nano-vllm[serve]'")
    settings = ServerSettings(**given(options, ServerSettings))
    set_up_process()
    config_flags = given(options, Config, skip=("model",))
    engine_settings = translate(config_flags | options.vllm_settings, Config.__dataclass_fields__)
    check_model(options.model, engine_settings.get("revision"))
    is_chat = engine_settings.get("task", "auto") in ("auto", "generate")
    if options.model == "tiny-qwen3" and is_chat and not engine_settings.keys() & {*SMALL_CACHE, "attention_backend"}:
        engine_settings |= SMALL_CACHE
        sizes = SMALL_CACHE["num_kvcache_blocks"], SMALL_CACHE["kvcache_block_size"]
        logging.getLogger("nanovllm").info(SMALL_CACHE_MESSAGE, *sizes)
    with reserved_address(settings) as listener, ExitStack() as loading:  # raises immediately if the address is in use

        def prepare() -> None:
            import_libraries(config_flags)
            loading.enter_context(waiting_for(f"Loading {options.model}"))

        def on_start() -> None:
            loading.close()
            announce(settings, options.model, listener)

        serve_here = serve_alone
        if settings.num_fronts:
            from nanovllm.serve.fronts.engine_process import serve_by_fronts as serve_here
        return serve_here(options.model, settings, engine_settings, listener, prepare, on_start)


def serve_alone(
    model: str,
    settings: ServerSettings,
    engine_settings: dict[str, Any],
    listener: socket,
    prepare: Callable[[], None],
    on_start: Callable[[], None],
) -> int:
    """Serve HTTP in this process. The arguments are the same as for `serve_by_fronts`."""
    prepare()
    from nanovllm.serve.server import run_server  # lazy, because PyTorch must be imported first

    llm = make_client(model, settings, engine_settings)
    try:
        return run_server(llm, settings, model, listener, on_start)
    finally:
        llm.exit()


def make_client(model: str, settings: ServerSettings, engine_settings: dict[str, Any]) -> "EngineClient":
    common = {"max_queued_requests": settings.max_queued_requests, **engine_settings}
    if settings.data_parallel_size == 1:
        from nanovllm.serve.async_llm import AsyncLLM

        return AsyncLLM(model, **common)
    from nanovllm.serve.replicas.async_replicas import AsyncReplicas

    return AsyncReplicas(model, num_replicas=settings.data_parallel_size, **common)
