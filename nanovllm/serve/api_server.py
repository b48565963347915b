"""Creates the application of the HTTP API, with its routes, middleware and error handlers."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from time import time
from typing import Any

from fastapi import FastAPI, Request, Response, exceptions
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from nanovllm import __version__
from nanovllm.serve import anthropic_api, pooling_api, responses_api
from nanovllm.serve.engine_client import EngineClient, EngineDeadError
from nanovllm.serve.errors import ApiError, api_error
from nanovllm.serve.http_responses import endpoint, error_response, has_route, json_response
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.openai_api import Api
from nanovllm.serve.request_limits import MAX_TEXT_BYTES, RequestLimits
from nanovllm.serve.settings import ServerSettings
from nanovllm.serve.view import view_router

METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")  # methods that a route may have; GET routes also answer HEAD


def create_app(
    llm: EngineClient, settings: ServerSettings, model: str, is_closing: Callable[[], bool] = lambda: False
) -> FastAPI:
    """model: the model as given on the command line.
    is_closing: a function that returns True when the server closes. The web page's event streams end when `is_closing`
        returns True.
    """
    takes_images = llm.input_processor.config.model_config.vision is not None
    expects_images = takes_images and settings.max_body_bytes is None
    if settings.max_body_bytes is None:
        settings = replace(settings, max_body_bytes=2**25 if takes_images else MAX_TEXT_BYTES)
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
    api.add_routes(app)
    for add_routes in (add_info_routes, anthropic_api.add_routes, responses_api.add_routes, pooling_api.add_routes):
        add_routes(app, api)
    app.state.adapters = api.adapters
    if settings.allow_runtime_lora_updating:
        api.adapters.add_routes(app)
    if settings.enable_dev_endpoints and llm.engine is not None:
        from nanovllm.serve import dev_api  # a lazy import, because the routes are optional

        dev_api.add_routes(app, llm.engine)
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.body_field is not None]
    endpoints = {route.path: endpoint(route, settings.request_timeout) for route in routes}
    if llm.has_one_engine:  # the page shows the steps of this engine
        app.include_router(view_router(llm.call, is_closing=is_closing))
    for kind in (HTTPException, exceptions.RequestValidationError, ApiError, EngineDeadError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(RequestLimits, settings=settings, endpoints=endpoints, expects_images=expects_images)
    if origins := settings.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def add_info_routes(app: FastAPI, api: Api) -> None:
    llm, started = api.llm, int(time())
    metrics = Metrics(llm, api.model_names[0], llm.input_processor.config.task)

    def entry(name: str) -> dict[str, Any]:
        common = {"id": name, "object": "model", "created": started, "owned_by": "nano-vllm"}
        origin = {"root": api.root, "parent": None}
        if (adapter := api.adapters.by_name.get(name)) is not None:
            origin = {"root": adapter.lora_path, "parent": api.model_names[0]}
        return common | origin | {"max_model_len": llm.input_processor.config.max_model_len}

    async def models() -> Response:
        names = [*api.model_names, *api.adapters.by_name]
        return json_response({"object": "list", "data": [entry(name) for name in names]})

    async def model(name: str) -> Response:
        return json_response(entry(api.model_name(name)))

    async def health() -> Response:
        health = llm.health()
        return json_response(health, 503 if health["status"] == "unavailable" else 200)

    async def version() -> Response:
        return json_response({"version": __version__})

    async def load() -> Response:
        return json_response({"server_load": llm.num_requests})

    async def metrics_text() -> Response:
        return Response(await metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.get("/v1/models")(models)
    app.get("/v1/models/{name:path}")(model)
    app.get("/health")(health)
    app.get("/ping")(health)  # SageMaker's name for /health
    app.post("/ping")(health)
    app.get("/version")(version)
    app.get("/load")(load)
    app.get("/metrics")(metrics_text)


async def _on_error(request: Request, error: Exception) -> Response:
    path, status, headers = request.scope["path"], getattr(error, "status_code", None), {}
    if status == 405:  # try each method, because included routers do not list methods
        methods = [method for method in METHODS if has_route(request.scope, method)]
        headers = {"allow": ", ".join([*methods, "HEAD"] if "GET" in methods else methods)}
    if status == 404:
        known = [getattr(route, "path", "") for route in request.app.routes]
        if meant := get_close_matches(path.removeprefix(request.scope["root_path"]), known, n=1, cutoff=0.75):
            error = ApiError(404, f"Not Found: did you mean {meant[0]}?")
    return error_response(api_error(error), path, **headers)
