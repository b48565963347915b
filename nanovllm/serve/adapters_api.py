"""Defines the adapters that clients can choose as models, and the routes that add and remove adapters.

The routes that add and remove adapters exist only with `--allow-runtime-lora-updating`.
"""

from collections.abc import Iterable
from itertools import count

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from nanovllm.lora.lora_request import LoRARequest
from nanovllm.serve.engine_client import EngineClient
from nanovllm.serve.errors import ApiError, require


class LoadBody(BaseModel):
    lora_name: str
    lora_path: str


class UnloadBody(BaseModel):
    lora_name: str


class ServedAdapters:
    """The adapters that clients can choose, by name.

    An adapter's name must not be in `reserved`, which contains the model's names.
    """

    def __init__(self, llm: EngineClient, adapters: Iterable[LoRARequest], reserved: Iterable[str]):
        """Raises ValueError if an adapter's name is not available, or if adapters are given without `enable_lora`."""
        self._llm, self._reserved = llm, {*reserved}
        self.by_name: dict[str, LoRARequest] = {}
        for adapter in adapters:
            module = f"{adapter.lora_name}={adapter.lora_path}"
            if not llm.input_processor.config.enable_lora:
                raise ValueError(f"lora_modules={module!r:.80}: needs enable_lora=True")
            if adapter.lora_name in self._reserved or adapter.lora_name in self.by_name:
                raise ValueError(f"lora_modules={module!r:.80}: another model has this name")
            self.by_name[adapter.lora_name] = adapter
        self._numbers = count(len(self.by_name) + 1)

    async def read(self) -> None:
        """Read all adapters at startup to detect broken ones.

        If the engine's process has already read the adapters, do nothing. A replica reads an adapter when the first
        request uses it. Raises ValueError if an adapter can't be used.
        """
        for adapter in self.by_name.values() if self._llm.reads_adapters else ():
            await self._read(adapter)

    async def _read(self, adapter: LoRARequest) -> None:
        arguments = adapter.lora_name, adapter.lora_int_id, adapter.lora_path
        if problem := await self._llm.call("add_lora", *arguments):
            raise ValueError(problem)

    def add_routes(self, app: FastAPI) -> None:
        """Raises ValueError without `enable_lora`."""
        if not self._llm.input_processor.config.enable_lora:
            raise ValueError("allow_runtime_lora_updating=True: needs enable_lora=True")
        app.post("/v1/load_lora_adapter")(self.load)
        app.post("/v1/unload_lora_adapter")(self.unload)

    async def load(self, body: LoadBody, request: Request) -> Response:
        name = require(body.lora_name, "lora_name: must have at least 1 character")
        require(body.lora_path, "lora_path: must have at least 1 character")
        require(
            name not in self._reserved | self.by_name.keys(), f"lora_name={name!r:.80}: another model has this name"
        )
        self._reserved.add(name)  # so that no other request takes the name while the adapter is read
        try:
            adapter = LoRARequest(name, next(self._numbers), body.lora_path)
            await self._read(adapter)
        except ValueError as error:
            raise ApiError(400, str(error), "lora_path") from None
        finally:
            self._reserved.discard(name)
        self.by_name[name] = adapter
        return Response(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(self, body: UnloadBody, request: Request) -> Response:
        if (adapter := self.by_name.pop(body.lora_name, None)) is None:
            raise ApiError(404, f"lora_name={body.lora_name!r:.80}: there is no such adapter", "lora_name")
        await self._llm.call("remove_lora", adapter.lora_int_id)
        return Response(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")
