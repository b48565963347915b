"""The command line: `nanovllm serve`, `nanovllm generate`, `nanovllm chat`, `nanovllm bench`."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import nanovllm
from nanovllm.serve.settings import ServerSettings
from nanovllm.serve.vllm_flags import translate_flags
from nanovllm.utils.checks import check_int
from nanovllm.utils.flags import Parser, add_flags, given

if TYPE_CHECKING:
    from nanovllm.serve.engine_client import EngineClient

# of the bundled model: few and small blocks, so that its page shows sharing and preemptions with a few chats
SMALL_CACHE = {"kvcache_block_size": 16, "num_kvcache_blocks": 200}
# seconds after which a thread lets another one that waits for the interpreter run (Python has 0.005): the engine's
# thread must not wait for the event loop while the device is idle
SWITCH_INTERVAL = 0.001


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and end the process with its status: 2 for a wrong command line or setting."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "bench":  # its arguments are its own
        from nanovllm.benchmarks.command import main as bench

        bench(arguments[1:], prog="nanovllm bench")
        sys.exit(0)
    options = parse(arguments)
    try:
        sys.exit(options.run(options))
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"nanovllm {options.command}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command; `vllm_settings` of `serve` are those of vLLM's engine that are no flags here."""
    from nanovllm.config import Config

    parser = make_parser()
    if not arguments or arguments[0] != "serve":
        return parser.parse_args(arguments)
    own = {"data_parallel_size", "api_server_count", *Config.__dataclass_fields__, *ServerSettings.__dataclass_fields__}
    try:
        rest, settings = translate_flags(arguments[1:], own)
    except ValueError as error:
        parser.error(str(error))
    options = parser.parse_args(["serve", *rest])
    options.vllm_settings = settings
    return options


def make_parser() -> argparse.ArgumentParser:
    from nanovllm.config import Config
    from nanovllm.serve.terminal import commands as terminal

    parser = Parser("nanovllm", description="LLM inference: an HTTP server, or answers right here.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {nanovllm.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    formatter = partial(argparse.HelpFormatter, max_help_position=32, width=110)

    def add_command(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, formatter_class=formatter)
        text = "a folder in the Hugging Face layout, a hub id, or tiny-qwen3, which is part of this package"
        command.add_argument("model", metavar="MODEL", help=text, nargs="?" if name == "chat" else None)
        command.set_defaults(run=run)
        return command

    text = "Serve a model with OpenAI's HTTP API, at http://127.0.0.1:8000 unless told otherwise."
    command = add_command("serve", text, serve)
    add_flags(command, ServerSettings, "server", several=("served_model_name",))
    text = "how many answers may wait in addition to the max_num_seqs that run; further ones get a 429 (default: 1024)"
    command.add_argument("--max-queued-requests", type=int, metavar="N", default=1024, help=text)
    text = "how many engines answer, each on GPUs of its own, as actors of Ray (default: 1, without Ray)"
    command.add_argument("--data-parallel-size", type=int, metavar="N", default=1, help=text)
    text = "how many processes speak HTTP, for one engine in another process (default: 1, in the engine's own process)"
    command.add_argument("--api-server-count", type=int, metavar="N", default=1, help=text)
    add_flags(command, Config, "engine", skip=("model",))

    command = add_command("generate", "Print a model's answer to a prompt while it is generated.", terminal.generate)
    terminal.add_generate_flags(command)
    command = add_command("chat", "Talk to a model in the terminal, in several turns.", terminal.chat)
    terminal.add_chat_flags(command)

    text = "Measure throughput and latency; `nanovllm bench --help` lists the workloads and arguments."
    commands.add_parser("bench", help=text, add_help=False)
    return parser


def serve(options: argparse.Namespace) -> int:
    try:
        from nanovllm.serve import server
    except ImportError as error:
        raise ImportError(f"{error.name} is not installed; pip install 'nano-vllm[serve]'") from error
    from nanovllm.compat.settings import translate
    from nanovllm.config import Config

    settings = ServerSettings(**given(options, ServerSettings))
    show_log()
    own = given(options, Config, skip=("model",))
    engine_settings = translate(own | options.vllm_settings, Config.__dataclass_fields__)
    if options.model == "tiny-qwen3" and not engine_settings.keys() & {*SMALL_CACHE, "attention_backend"}:
        engine_settings |= SMALL_CACHE
        logging.getLogger("nanovllm").info("a small cache, unless flags set another one: %s", SMALL_CACHE)
    num_fronts = check_int("api_server_count", options.api_server_count, low=1)
    if num_fronts > 1 and options.data_parallel_size > 1:
        raise ValueError(f"api_server_count={num_fronts}: must be 1 with several replicas")
    sys.setswitchinterval(SWITCH_INTERVAL)
    if num_fronts > 1:
        from nanovllm.serve.fronts.engine_process import serve_by_fronts  # imported lazily, as few servers have them

        return serve_by_fronts(num_fronts, options.model, settings, engine_settings, options.max_queued_requests)
    with server.listening_socket(settings) as listener:  # an address that is in use is an error at once
        llm = make_client(options.model, options.data_parallel_size, options.max_queued_requests, engine_settings)
        try:
            return server.run_server(llm, settings, options.model, listener)
        finally:
            llm.exit()


def make_client(model: str, num_replicas: int, max_queued: int, settings: dict[str, Any]) -> "EngineClient":
    if num_replicas == 1:
        from nanovllm.serve.async_llm import AsyncLLM

        return AsyncLLM(model, max_queued_requests=max_queued, **settings)
    from nanovllm.serve.replicas.async_replicas import AsyncReplicas

    return AsyncReplicas(model, num_replicas=num_replicas, max_queued_requests=max_queued, **settings)


def show_log() -> None:
    """Print what the package logs: the engine's settings at the start, and errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("nanovllm").addHandler(handler)
    logging.getLogger("nanovllm").setLevel(logging.INFO)
