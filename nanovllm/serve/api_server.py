"""The application behind the HTTP API: what a request passes, and how errors are answered."""

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match

from nanovllm import __version__
from nanovllm.serve.anthropic_api import messages_router
from nanovllm.serve.engine_client import EngineClient, EngineDeadError
from nanovllm.serve.errors import ApiError, api_error, unreadable_body, validation_error
from nanovllm.serve.http_responses import ErrorResponse
from nanovllm.serve.info_api import info_router
from nanovllm.serve.openai_api import Api
from nanovllm.serve.request_limits import RequestLimits
from nanovllm.serve.responses_api import responses_router
from nanovllm.serve.settings import ServerSettings
from nanovllm.serve.view import view_router


def create_app(
    llm: EngineClient, settings: ServerSettings, model: str, is_closing: Callable[[], bool] = lambda: False
) -> FastAPI:
    """model: as it was given on the command line. `is_closing` tells the page's endless streams to end."""
    app = FastAPI(
        title="nano-vllm",
        version=__version__,
        openapi_url="/openapi.json" if settings.enable_openapi else None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    own_name = Path(model).absolute().name if Path(model).expanduser().is_dir() else model  # a hub id has a `/`
    api = Api(llm, settings, settings.served_model_name or (own_name,), own_name)
    app.include_router(api.router())
    app.include_router(info_router(api))
    app.include_router(messages_router(api))
    app.include_router(responses_router(api.converse))
    if llm.engine is not None:  # the page shows the steps of one engine
        app.include_router(view_router(llm, is_closing=is_closing))
    app.add_exception_handler(HTTPException, _on_http_error)
    for kind in (RequestValidationError, ApiError, EngineDeadError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(RequestLimits, settings=settings, endpoints=api.endpoints())
    if settings.allowed_origins:
        origins = [*settings.allowed_origins]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the framework: an unknown path, a wrong method, a body that it can't read."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, (ValueError, RecursionError)):
        return ErrorResponse(unreadable_body(error.__cause__))
    headers = {"allow": ", ".join(_methods(request))} if error.status_code == 405 else {}
    return ErrorResponse(ApiError(error.status_code, str(error.detail)), **headers)


def _methods(request: Request) -> list[str]:
    """The methods that the path has."""
    scopes = {method: {**request.scope, "method": method} for method in ("DELETE", "GET", "PATCH", "POST", "PUT")}
    routes = request.app.routes
    found = [name for name, scope in scopes.items() if any(x.matches(scope)[0] is Match.FULL for x in routes)]
    return [*found, "HEAD"] if "GET" in found else found


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        return ErrorResponse(validation_error(error.errors()))
    return ErrorResponse(api_error(error))
