"""Defines a worker for vLLM. vLLM imports the worker by name in a separate process."""

from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.v1.worker.gpu_worker import Worker


class WorkerWithHead(Worker):
    """A worker that drafts with the output layer of an EAGLE-3 head.

    vLLM learns from the checkpoint whether a head has an output layer. Without a checkpoint, vLLM would draft with the
    model's output layer, which is several times as large as the head's.
    """

    def load_model(self, **options):
        Eagle3LlamaForCausalLM.has_own_lm_head = True
        super().load_model(**options)
