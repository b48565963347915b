"""Defines routes for trainers. Trainers pause the engine, put it to sleep, load weights, and reset the prefix cache.

Only trainers may use the routes, so the routes exist only with `--enable-dev-endpoints`.
"""

from asyncio import to_thread
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel

from nanovllm.llm import LLM
from nanovllm.rollout import weights_of
from nanovllm.serve.errors import about
from nanovllm.serve.http_responses import json_response


class WeightsBody(BaseModel):
    path: str


def add_routes(app: FastAPI, llm: LLM) -> None:
    async def pause(mode: str = "abort") -> Response:
        with about(("mode",)):
            await to_thread(llm.pause, mode)
        return json_response({"status": "paused"})

    async def resume() -> Response:
        with about(()):
            await to_thread(llm.resume)
        return json_response({"status": "resumed"})

    async def is_paused() -> Response:
        return json_response({"is_paused": "paused" in llm.core.unavailable})

    async def reset_prefix_cache() -> Response:
        return json_response({"success": await to_thread(llm.reset_prefix_cache)})

    async def update_weights(body: WeightsBody, request: Request) -> Response:
        with about(("path",)):
            await to_thread(lambda: llm.load_weights(weights_of(body.path)))
        return json_response({"status": "updated"})

    async def sleep(level: int = 1, keep_prefix_cache: bool = False) -> Response:
        with about(("level", "keep_prefix_cache", "enable_sleep_mode")):
            num_bytes = await to_thread(llm.sleep, level, keep_prefix_cache)
        return json_response({"status": "asleep", "num_bytes": num_bytes})

    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        with about(("tags", "enable_sleep_mode")):
            await to_thread(llm.wake_up, tags)
        return json_response({"is_sleeping": llm.is_sleeping()})

    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": llm.is_sleeping()})

    app.post("/sleep")(sleep)
    app.post("/wake_up")(wake_up)
    app.get("/is_sleeping")(is_sleeping)
    app.post("/pause")(pause)
    app.post("/resume")(resume)
    app.get("/is_paused")(is_paused)
    app.post("/reset_prefix_cache")(reset_prefix_cache)
    app.post("/update_weights")(update_weights)
