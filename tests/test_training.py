"""The program of `nanovllm/docs/training.md`, with fewer steps, and TRL's mode that has vLLM in the same process."""

import json
import os
import subprocess
import sys

import pytest
import torch
from common import TINY

pytestmark = pytest.mark.training
pytest.importorskip("trl")

from train_grpo import compare_logprobs, greedy_reward, program, rewards

MAX_DIFFERENCE, MEAN_DIFFERENCE = 1e-3, 1e-5  # of the log-probabilities of trainer and engine, in float32


def test_the_reward_rises(tmp_path):
    """Of sampled answers to the questions that it is trained on, and of greedy answers to others."""
    with torch.enable_grad():
        on_cpu = {'LLM("tiny-qwen3"': 'LLM("tiny-qwen3", device="cpu"', "bf16=False": "bf16=False, use_cpu=True"}
        names = program(6, str(tmp_path), on_cpu)
        differences = compare_logprobs(names["trainer"])
        before = greedy_reward(names)
        names["trainer"].train()
    sampled = rewards(names["trainer"])
    assert len(sampled) == 6 and sum(sampled[-2:]) / 2 > sampled[0] + 0.3
    assert greedy_reward(names) > before + 0.15
    of_all_tokens = torch.cat(differences)
    assert len(differences) == 6 and len(of_all_tokens) > 6 * 64 * 10
    assert of_all_tokens.max() < MAX_DIFFERENCE and of_all_tokens.mean() < MEAN_DIFFERENCE
    names["llm"].exit()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the program would train on the GPU")
def test_adapter_as_policy(tmp_path):
    """The engine gets an adapter in each step, and computes the trainer's log-probabilities with it."""
    pytest.importorskip("peft")
    from train_grpo_lora import lora_program

    with torch.enable_grad():
        names = lora_program(3, 16, tmp_path, {"bf16=False": "bf16=False, use_cpu=True"})
        differences = compare_logprobs(names["trainer"])
        names["trainer"].train()
    sampled, of_all_tokens = rewards(names["trainer"]), torch.cat(differences)
    assert len(sampled) == 3 and sampled[-1] > sampled[0] + 0.2
    assert of_all_tokens.max() < MAX_DIFFERENCE and of_all_tokens.mean() < MEAN_DIFFERENCE
    names["llm"].exit()


PROGRAM = """
import json, sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
import vllm

prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Sort: {i}; 9; 3"}]} for i in range(16)])
settings = GRPOConfig(
    sys.argv[2], per_device_train_batch_size=8, max_completion_length=16, max_steps=2, logging_steps=1, bf16=False,
    report_to="none", use_cpu=True, use_vllm=True, vllm_mode="colocate", learning_rate=1e-4, temperature=0.9,
    vllm_enable_sleep_mode=sys.argv[3] == "True",
)
length = lambda completions, **columns: [float(len(message["content"])) for (message,) in completions]
trainer = GRPOTrainer(sys.argv[1], length, args=settings, train_dataset=prompts)
assert type(trainer.vllm_generation.llm) is vllm.LLM
trainer.train()
print(json.dumps([x for x in trainer.state.log_history if "reward" in x]))
"""


@pytest.mark.parametrize("sleeps", [False, True])
def test_colocated_vllm(tmp_path, sleeps):
    """TRL's own measure of how far the log-probabilities are apart, also after a step, thus with new weights.

    It may let the engine sleep between rollouts.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "nanovllm.compat", str(tmp_path / "program.py"), TINY, str(tmp_path), str(sleeps)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    steps = json.loads(result.stdout.splitlines()[-1])
    assert len(steps) == 2
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < MAX_DIFFERENCE
        assert step["sampling/sampling_logp_difference/mean"] < MEAN_DIFFERENCE
