"""Defines `LLM`, the class that users import."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import OutputKind, RequestOutput
from nanovllm.features.beam_params import BeamSearchParams
from nanovllm.features.beam_search import BeamSearchOutput, beam_requests
from nanovllm.pooling.calls import classify, embed, score
from nanovllm.requests.prompts import as_conversations, check_template_arguments
from nanovllm.requests.request import Adapters, Message, Prompt
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.lora.lora_request import LoRARequest


class LLM(LLMEngine):
    """An engine for offline generation: `LLM(model, **settings).generate(prompts, sampling_params)`.

    Adds chat and beam search to LLMEngine, which defines `generate`, `stream`, `step` and other methods.
    """

    embed, score, classify = embed, score, classify  # of pooling/

    def get_tokenizer(self):
        """Return the model's tokenizer, as loaded by transformers."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters in the model's `generation_config.json`. Parameters that are not in the file have the
        defaults of SamplingParams.
        """
        return self.input_processor.default_sampling_params()

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        chat_template_kwargs: Mapping | None = None,
        priority: list[int] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer one or more conversations, as `generate` answers prompts.

        A conversation is a list of dicts with the keys `role` and `content`. `chat_template_kwargs` are passed to the
        chat template, for example `{"enable_thinking": False}`. Raises ValueError if the template can't render a
        conversation.
        """
        template_arguments = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        } | check_template_arguments(chat_template_kwargs)
        conversations, kind = as_conversations(messages), OutputKind.FINAL_ONLY
        requests = self.input_processor.requests(
            conversations, sampling_params, kind, template_arguments, priority, lora_request
        )
        return self._run(requests, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | list[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        priority: list[int] | None = None,
        lora_request: Adapters = None,
    ) -> list[BeamSearchOutput]:
        """Find the most likely answers to each prompt by beam search, and return them best first.

        Raises the same errors as `generate`.
        """
        requests = beam_requests(self.input_processor, prompts, params, priority)
        return self._run(self.input_processor.with_adapters(requests, lora_request), use_tqdm)

    def add_lora(self, lora_request: "LoRARequest") -> None:
        """Read an adapter, and keep it in host memory until `remove_lora` is called.

        Raises the errors of `lora.adapter_registry.AdapterRegistry.get`, and ValueError without `enable_lora=True`.
        """
        self._adapters().add(lora_request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter. The next request with this `lora_int_id` reads the adapter's files again.

        Unfinished requests continue to use the adapter. Return False if host memory has no adapter with this id.
        """
        return self._adapters().remove(lora_int_id)

    def _adapters(self) -> Any:
        self.engine_thread.check_open()
        if self.core.adapters is None:
            raise ValueError("enable_lora=False: must be True when the engine is started, for it to use adapters")
        return self.core.adapters
