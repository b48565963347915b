"""Errors of the HTTP API, in the shape of OpenAI's: `{"error": {"message", "type", "param", "code"}}`."""

import logging
import re
from collections.abc import Container, Sequence

from nanovllm.serve.engine_client import EngineDeadError, QueueFullError

logger = logging.getLogger("nanovllm")
RETRY_SECONDS = 1  # for clients that are refused because the queue is full

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer to the client: its status, and what its body says."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": str(RETRY_SECONDS)} if self.status in (429, 503) else {}

    def body(self) -> dict:
        kind = TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class RequestTimeoutError(Exception):
    """The request took longer than the server allows."""


def api_error(error: BaseException, fields: Container[str] | None = None) -> ApiError:
    """What a client may know of an error; anything unexpected is logged, and the client is told no more than that.

    fields: of a request that is being checked, so that ValueError and TypeError are the client's; an error that begins
        with one of these names is about that field. None: the request is fine, and any such error is our own.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, f"the server is full: {error}", code="queue_full")
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine is not running", code="engine_dead")
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, "the request took longer than this server allows", code="timeout")
    if isinstance(error, (ValueError, TypeError)) and fields is not None:
        return _bad_request(str(error), fields)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error")


def _bad_request(message: str, fields: Container[str]) -> ApiError:
    name = re.match(r"\w*", message)[0]  # type: ignore[index]
    is_too_long = name == "prompt" and "max_model_len" in message
    if name == "prompt" and "messages" in fields:
        name = "messages"
    return ApiError(400, message, name if name in fields else None, "context_length_exceeded" if is_too_long else None)


def validation_error(errors: Sequence[dict]) -> ApiError:
    """Of what pydantic has found, the first; a field may have several, one for each type that it could have."""
    first = errors[0]
    # without "body", and without the names of alternatives, which are classes of ours
    path = [str(part) for part in first["loc"][1:] if not str(part).endswith("Body")]
    param = path[0] if path else None
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON")
    if param is None or param.isdigit():
        return ApiError(400, "the body must be a JSON object")
    if first["type"] == "extra_forbidden":
        message = f"{'.'.join(path)[:80]}: this field is unknown or not supported"
        return ApiError(400, message, param[:80], "unknown_parameter")
    texts = dict.fromkeys(error["msg"] for error in errors if param in error["loc"])
    where = ".".join(path) if len(texts) == 1 else param
    return ApiError(400, f"{where}: {'; or '.join(texts)}"[:500], param)
