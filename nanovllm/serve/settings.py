"""Settings of the HTTP server."""

from dataclasses import dataclass

from nanovllm.serve.tool_parsers import PARSERS
from nanovllm.utils.checks import check_choice, check_int, check_real

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Who may use the server, under which names, and the bounds of what a client can take.

    host: the address to listen on; the default can't be reached from other machines.
    port: the port to listen on; 0 is any free one.
    api_key: clients must send one of these keys as `Authorization: Bearer KEY`; the environment variable
        NANOVLLM_API_KEY is one more, and is not visible in the list of processes. None: no key is needed.
    allowed_origins: web pages of these origins may call the server from a browser; None is no other page than its own.
    allowed_hosts: the names that a request's Host header may have; None is any, or those of this machine if `host` is
        one of them, so that no web page can reach the server through a name of its own (DNS rebinding).
    served_model_name: the names of the model in the API; None is MODEL, without the path
        if it is a folder.
    tool_call_parser: the format of tool calls: "hermes" (Qwen), "llama3_json", "none", or "auto", which looks at the
        chat template.
    reasoning_parser: "think" puts the text between <think> and </think> into `reasoning_content`; with "none" it stays
        in the content.
    max_body_bytes: maximum size of a request's body.
    max_answers: maximum number of answers of one request: prompts times `n`.
    request_timeout: seconds after which a request that is still running is ended.
    body_timeout: seconds within which a request's body must have arrived.
    max_connections: maximum number of open connections; further ones are answered with 503.
    drain_seconds: after SIGTERM or Ctrl-C, how long requests that are running may go on.
    access_log: print a line for each request.

    Raises ValueError or TypeError with the value and the bound.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] | None = None
    allowed_hosts: tuple[str, ...] | None = None
    served_model_name: tuple[str, ...] | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "none"
    max_body_bytes: int = 2 * 2**20
    max_answers: int = 128
    request_timeout: float = 600.0
    body_timeout: float = 30.0
    max_connections: int = 4096
    drain_seconds: int = 30
    access_log: bool = False

    def __post_init__(self) -> None:
        if "" in (self.api_key or ()):  # an unset variable of a shell must not open the server
            raise ValueError("api_key='': must have at least 1 character")
        check_int("port", self.port, low=0, high=65535)
        check_choice("tool_call_parser", self.tool_call_parser, ("auto", *PARSERS))
        check_choice("reasoning_parser", self.reasoning_parser, ("none", "think"))
        for name in ("max_body_bytes", "max_answers", "max_connections"):
            check_int(name, getattr(self, name), low=1)
        for name in ("request_timeout", "body_timeout"):
            check_real(name, getattr(self, name), low=0.001, high=1e6)
        check_int("drain_seconds", self.drain_seconds, low=0)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in ("localhost", "127.0.0.1", "::1")

    def hosts(self) -> tuple[str, ...] | None:
        """The allowed values of a Host header without its port; None is any."""
        if self.allowed_hosts is None and self.is_local:
            return LOOPBACK_HOSTS
        return self.allowed_hosts
