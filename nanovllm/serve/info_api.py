"""Routes that tell about the server: its models, health, version, load and metrics."""

from time import time
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from nanovllm import __version__
from nanovllm.serve.http_responses import json_response
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.openai_api import Api


def add_routes(app: FastAPI, api: Api) -> None:
    llm, metrics, started = api.llm, Metrics(api.llm, api.model_names[0]), int(time())

    def entry(name: str) -> dict[str, Any]:
        found = {"id": name, "object": "model", "created": started, "owned_by": "nano-vllm"}
        return found | {"root": api.root, "parent": None, "max_model_len": llm.input_processor.config.max_model_len}

    async def models() -> Response:
        return json_response({"object": "list", "data": [entry(name) for name in api.model_names]})

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
    app.get("/ping")(health)  # SageMaker's name
    app.post("/ping")(health)
    app.get("/version")(version)
    app.get("/load")(load)
    app.get("/metrics")(metrics_text)
