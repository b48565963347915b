"""Defines the errors of the HTTP API, in OpenAI's format `{"error": {"message", "type", "param", "code"}}`.

`/v1/messages` uses Anthropic's format, `{"type": "error", "error": {"type", "message", "details": {"error_code"}}}`.
"""

import asyncio
import json
import logging
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from nanovllm.engine.engine import UnavailableError
from nanovllm.serve.engine_client import EngineDeadError, QueueFullError

logger = logging.getLogger("nanovllm")
T = TypeVar("T")
MAX_MESSAGE = 500  # characters; a message may quote what a client has sent
MAX_LEVELS = 100  # of nested lists and objects; templates and grammars can't process more levels
RETRY = {"retry-after": "1"}  # seconds; for clients that are refused because the server is full or unavailable
HEADERS = {401: {"www-authenticate": "Bearer"}, 429: RETRY, 503: RETRY}  # by HTTP status

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
MESSAGES_PATH = "/v1/messages"  # Anthropic's API
MESSAGES_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}


class ApiError(Exception):
    """An error for the client, with the HTTP status and the contents of the body."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        message = message[:MAX_MESSAGE]
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = HEADERS.get(status, {})

    def rename(self, names: Mapping[str, str]) -> None:
        """Replace the server's name of a field with the client's name.

        `names` maps the server's names to the client's names.
        """
        if self.param is not None and (client_name := names.get(self.param)) is not None:
            self.message, self.param = self.message.replace(self.param, client_name, 1), client_name

    def body(self, path: str = "") -> dict:
        """Return the body of the response, in the format of the API at `path`."""
        kind = TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        if MESSAGES_PATH in path:
            error = {"type": MESSAGES_TYPES.get(self.status, kind), "message": self.message}
            details = {} if self.code is None else {"details": {"error_code": self.code}}
            return {"type": "error", "error": error | details}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def require(value: T | Literal[False] | None, problem: str, code: str | None = None) -> T:
    """Return `value` if it is true.

    If `value` is false, raise an ApiError with status 400 and the message `problem`, which begins with a field's name.
    """
    if not value:
        raise ApiError(400, problem, re.split(r"\W", problem)[0], code)
    return value


def api_error(error: BaseException, fields: Container[str] | None = None) -> ApiError:
    """Convert an error to an ApiError. Unexpected errors are logged, and the client gets no details.

    fields: the field names of the request that is being checked, or `None` if the request was already accepted. While a
        request is being checked, ValueError, TypeError and FileNotFoundError count as the client's fault. If the error
        message begins with a field's name, the ApiError refers to that field.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # from the framework: an unknown path, or a wrong method
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):  # about the query; `body_error` handles bodies
        return _validation_error([problem | {"loc": problem["loc"][1:]} for problem in error.errors()])
    if isinstance(error, QueueFullError):
        return ApiError(429, f"the server is full: {error}", code="queue_full")
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine is not running", code="engine_dead")
    if isinstance(error, asyncio.CancelledError):  # the time of `drain_seconds` is over, or Ctrl-C came again
        return ApiError(503, "the server has ended", code="server_ended")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows", code="timeout")
    if isinstance(error, (ValueError, TypeError, FileNotFoundError)) and fields is not None:
        return _bad_request(str(error), fields)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error")


@contextmanager
def about(fields: Container[str]) -> Iterator[None]:
    """Convert errors in a `with` block to ApiErrors.

    The block checks a request that may have the fields in `fields`.
    """
    try:
        yield
    except Exception as error:
        raise api_error(error, fields) from None


def _bad_request(message: str, fields: Container[str]) -> ApiError:
    name = re.match(r"\w*", message)[0]  # type: ignore[index]
    code = "context_length_exceeded" if name == "prompt" and "max_model_len" in message else None
    if name == "prompt" and "messages" in fields:
        name = "messages"
    return ApiError(400, message, name if name in fields else None, code)


def body_error(error: Exception) -> ApiError:
    """Return the error for a body that is not JSON, or that pydantic refuses."""
    problem = "not valid JSON: a number has too many digits"
    if isinstance(error, ValidationError):
        return _validation_error(error.errors())
    if isinstance(error, json.JSONDecodeError):
        problem = f"not valid JSON: {error.msg} at character {error.pos}"
    elif isinstance(error, UnicodeDecodeError):
        problem = f"not valid {error.encoding.upper()}: byte {error.object[error.start]:#x} at position {error.start}"
    elif isinstance(error, RecursionError):
        problem = "nested too deeply: lists and objects within each other, beyond some hundred levels"
    return ApiError(400, f"the body is {problem}")


def too_deep(error: Exception, body: bytes) -> Exception:
    """Return an ApiError that names a field with too many nested levels.

    If no field has too many levels, return `error`.
    """
    for name, value in json.loads(body).items():
        level = [value]
        for _ in range(MAX_LEVELS):
            lists = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, (dict, list))]
            level = [item for items in lists for item in items]
        if level:
            return ApiError(400, f"{name[:80]}: is nested in more than {MAX_LEVELS} levels", name[:80])
    return error


def _validation_error(errors: Sequence[Any]) -> ApiError:
    """Return an ApiError for the first invalid field. `errors` contains an error for each possible type of a field."""
    # leave out the names of our classes, which stand for alternative types
    path = [str(part) for part in errors[0]["loc"] if not str(part).endswith("Body")]
    param = path[0] if path else None
    if param is None or param.isdigit():
        return ApiError(400, "the body must be a JSON object")
    texts = dict.fromkeys(error["msg"] for error in errors if param in error["loc"])
    where = ".".join(path) if len(texts) == 1 else param
    return ApiError(400, f"{where}: {'; or '.join(texts)}", param)
