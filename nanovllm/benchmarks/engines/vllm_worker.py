"""A worker of vLLM, which vLLM imports by its name in a process of its own."""

from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.v1.worker.gpu_worker import Worker


class WorkerWithHead(Worker):
    """It drafts with a head's own output layer. vLLM learns from a checkpoint that there is one, which random weights
    lack: it would take the model's, of several times as many tokens.
    """

    def load_model(self, **options):
        Eagle3LlamaForCausalLM.has_own_lm_head = True
        super().load_model(**options)
