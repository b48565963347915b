"""Settings of the HTTP server."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanovllm.lora.lora_request import LoRARequest
from nanovllm.reasoning.formats import FORMATS
from nanovllm.serve.tool_parsers import PARSERS
from nanovllm.utils.checks import check_choice, check_fields, check_int, check_real, checked
from nanovllm.utils.cores import available_cores

# names of vLLM's parsers for the same formats
ALIASES = {
    "tool_call_parser": {
        **dict.fromkeys(("qwen", "qwen25", "qwen3"), "hermes"),
        "qwen3_xml": "qwen3_coder",
        "llama4_json": "llama3_json",
        "deepseek_v31": "deepseek_v3",
    },
}
KEEP_ALIVE_VARIABLE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"  # an environment variable
KEEP_ALIVE_SECONDS = 120.0
CORES_FOR_A_FRONT = 4  # with fewer, a second process takes memory, but hardly shortens the engine's waits for the GIL
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of the HTTP server: its address, access, formats and limits.

    host: the address to listen on. Other machines can't reach the default address.
    port: the port to listen on; 0 selects any free port.
    api_key: a key that clients must send as `Authorization: Bearer KEY` or `x-api-key: KEY`; by default no key is
        needed. The environment variables NANOVLLM_API_KEY and VLLM_API_KEY add further keys, which do not appear in the
        process list.
    allowed_origins: an origin whose web pages may call the server from a browser; by default, only the server's own
        page may do so.
    allowed_hosts: a name to accept in a request's Host header. By default, a server on a loopback address accepts only
        the loopback names, and any other server accepts all names. The restriction protects local servers against DNS
        rebinding, where an attacker's web page reaches the server through a domain name that the attacker controls.
    served_model_name: the names of the model in the API; by default MODEL, or the folder's name if MODEL is a path.
    lora_modules: the adapters that clients can choose as `model`, each as NAME=PATH. Adapters need the engine's setting
        `enable_lora`.
    allow_runtime_lora_updating: allow clients to add and remove adapters with `/v1/load_lora_adapter` and
        `/v1/unload_lora_adapter`. With this setting, clients can make the server read any folder.
    chat_template: the chat template, or the path of a file with the template; by default the model's template.
    tool_call_parser: the format of tool calls, with other names for a format in parentheses: "hermes" ("qwen",
        "qwen25", "qwen3"), "qwen3_coder" ("qwen3_xml"), "seed_oss", "llama3_json" ("llama4_json"), "mistral",
        "deepseek_v3" ("deepseek_v31") or "openai" (for gpt-oss). With "none", the calls stay in the content. With
        "auto", the chat template determines the format. If the template has no known format, requests with tools are
        refused.
    reasoning_parser: the format of reasoning, with other names for a format in parentheses: "think" ("qwen3",
        "deepseek_v3", "glm45"), "deepseek_r1" (answers may contain only the end marker), "mistral", "seed_oss" or
        "openai_gptoss". Answers contain the reasoning as `reasoning` and `reasoning_content`. With "none", the
        reasoning stays in the content. With "auto", the chat template determines the format.
    trust_request_chat_template: allow requests to contain a chat template. A template is a program that runs in
        jinja2's sandbox, in a process that is limited to 2 seconds and 512 MiB per template.
    max_body_bytes: maximum size of a request body; by default 2 MiB, or 32 MiB if the model takes images.
    max_answers: maximum number of answers per request. The number of answers of a request is its number of prompts
        times `n`.
    request_timeout: seconds after which a request is ended, including its time in the queue.
    body_timeout: seconds within which the body of a request must arrive.
    timeout_keep_alive: seconds after which an idle connection is closed; by default the value of the environment
        variable VLLM_HTTP_TIMEOUT_KEEP_ALIVE, or 120 if it is not set. Many clients reuse connections that were idle
        for up to 90 seconds. A request fails if the server closes the connection at the moment when the client sends
        the request.
    max_connections: maximum number of open connections. To accept a further connection, the server closes the
        connection that has been idle longest. If no connection is idle, the new connection gets the HTTP status 503.
    drain_seconds: the number of seconds that running requests get to finish after SIGTERM or Ctrl-C.
    access_log: print a line for each request.
    enable_openapi: describe the API at `/openapi.json`.
    enable_dev_endpoints: allow clients to pause the engine and to replace its weights.
    enable_force_include_usage: include the usage in every chunk of a stream, even if the request does not ask for
        usage.
    return_tokens_as_token_ids: in log-probabilities, write every token as `token_id:ID`.
    root_path: the path under which a proxy exposes this server.
    uds: the path of a Unix domain socket to listen on instead of `host` and `port`.
    max_queued_requests: maximum number of waiting answers, in addition to the `max_num_seqs` running answers. Further
        requests get the HTTP status 429.
    data_parallel_size: the number of engines, each on separate GPUs. If there are several engines, they run as Ray
        actors.
    api_server_count: the number of HTTP processes in addition to the engine's process; with 0, the engine's process
        also handles HTTP. The default is 1 on machines with at least 4 cores. The default is 0 on machines with fewer
        cores, with several engines, and with `enable_dev_endpoints`.

    Raises ValueError or TypeError with a message that states the wrong value and the bound.
    """

    host: str = "127.0.0.1"
    port: int = checked(8000, check_int, low=0, high=65535)
    api_key: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] | None = None
    allowed_hosts: tuple[str, ...] | None = None
    served_model_name: tuple[str, ...] | None = None
    lora_modules: tuple[str, ...] | None = None
    allow_runtime_lora_updating: bool = False
    chat_template: str | None = None
    tool_call_parser: str = checked("auto", check_choice, choices=("auto", *PARSERS))
    reasoning_parser: str = checked("auto", check_choice, choices=("auto", "none", *FORMATS))
    trust_request_chat_template: bool = False
    max_body_bytes: int | None = checked(None, check_int, low=1)
    max_answers: int = checked(128, check_int, low=1)
    request_timeout: float = checked(600.0, check_real, low=0.001, high=1e6)
    body_timeout: float = checked(30.0, check_real, low=0.001, high=1e6)
    timeout_keep_alive: float | None = checked(None, check_real, low=0, high=1e6)
    max_connections: int = checked(4096, check_int, low=1)
    drain_seconds: int = checked(30, check_int, low=0)
    access_log: bool = False
    enable_openapi: bool = False
    enable_dev_endpoints: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    root_path: str = ""
    uds: str | None = None
    max_queued_requests: int = checked(1024, check_int, low=0)
    data_parallel_size: int = checked(1, check_int, low=1)
    api_server_count: int | None = checked(None, check_int, low=0)

    def __post_init__(self) -> None:
        if "" in (self.api_key or ()):  # an unset shell variable must not open the server to everyone
            raise ValueError("api_key='': must have at least 1 character")
        for name, names in ALIASES.items():
            value = getattr(self, name)
            object.__setattr__(self, name, names.get(value, value))
        if self.chat_template is not None and "{" not in self.chat_template:  # then it is a file name
            object.__setattr__(self, "chat_template", Path(self.chat_template).read_text("utf-8"))
        check_fields(self)
        if self.timeout_keep_alive is None:
            object.__setattr__(self, "timeout_keep_alive", _keep_alive_of_environment())
        count, replicas = self.api_server_count or 0, self.data_parallel_size
        if count > 1 and replicas > 1:
            raise ValueError(f"api_server_count={count}: must be at most 1 with data_parallel_size={replicas}")
        for module in self.lora_modules or ():
            if not all(module.partition("=")):
                raise ValueError(f"lora_modules={module!r:.80}: must be NAME=PATH")
        if self.allow_runtime_lora_updating and (count > 1 or replicas > 1):
            problem = f"needs api_server_count of at most 1 and data_parallel_size=1, not {count} and {replicas}"
            raise ValueError(f"allow_runtime_lora_updating=True: {problem}")
        if self.enable_dev_endpoints and (count or replicas > 1):
            problem = f"needs api_server_count=0 and data_parallel_size=1, not {count} and {replicas}"
            raise ValueError(f"enable_dev_endpoints=True: {problem}")

    def adapters(self) -> Iterator[LoRARequest]:
        """Yield the adapters of `lora_modules`."""
        for number, module in enumerate(self.lora_modules or (), 1):
            name, _, path = module.partition("=")
            yield LoRARequest(name, number, path)

    @property
    def num_fronts(self) -> int:
        """The number of HTTP processes in addition to the engine's process. If there are replicas, the number is 0."""
        if self.data_parallel_size > 1 or self.enable_dev_endpoints:
            return 0
        if self.api_server_count is None:
            return int(available_cores() >= CORES_FOR_A_FRONT)
        return self.api_server_count

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return self.uds is not None or self.host in ("localhost", "127.0.0.1", "::1")

    def hosts(self) -> tuple[str, ...] | None:
        """Return the accepted values of the Host header, without the port. None means that any value is accepted."""
        if self.allowed_hosts is None and self.is_local and self.uds is None:  # web pages can't reach a Unix socket
            return LOOPBACK_HOSTS
        return self.allowed_hosts


def _keep_alive_of_environment() -> float:
    text = os.environ.get(KEEP_ALIVE_VARIABLE, "") or KEEP_ALIVE_SECONDS
    try:
        return check_real(KEEP_ALIVE_VARIABLE, float(text), low=0, high=1e6)
    except ValueError:
        raise ValueError(f"{KEEP_ALIVE_VARIABLE}={text!r:.80}: must be a number in 0 to 1,000,000") from None
