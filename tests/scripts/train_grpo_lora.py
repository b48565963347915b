"""Train an adapter of the bundled model by the program of `nanovllm/docs/training.md`, instead of all its weights.

usage: python tests/scripts/train_grpo_lora.py [--steps 20] [--rank 16]

In each step, the trainer saves its adapter, and the engine generates with it; the base model is never loaded again.
Prints the mean reward of sampled answers in the first and in the last three steps, and how far the log-probabilities of
trainer and engine are apart. Needs TRL and PEFT.
"""

import argparse
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig
from train_grpo import compare_logprobs, program, rewards

from nanovllm import LoRARequest


def lora_program(steps: int, rank: int, folder: Path, more_changes: dict[str, str] | None = None) -> dict[str, Any]:
    """The names that the page's program has before its last line, with a LoRA policy.

    `more_changes` are changes of the code, as in `program`.
    """
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")

    def hand_over(trainer: Any) -> LoRARequest:
        number = trainer.state.global_step + 1
        trainer.model.save_pretrained(own := folder / str(number))
        return LoRARequest("policy", number, str(own))

    program_names = {"hand_over": hand_over, "peft_config": config}
    changes = {
        'LLM("tiny-qwen3"': f'LLM("tiny-qwen3", enable_lora=True, max_loras=1, max_lora_rank={rank}',
        "    llm.load_weights(trainer.model.named_parameters())\n": "    adapter = hand_over(trainer)\n",
        "params, use_tqdm=False)": "params, use_tqdm=False, lora_request=adapter)",
        "learning_rate=5e-5": "learning_rate=1e-3",
        "rollout_func=roll_out)": "rollout_func=roll_out, peft_config=peft_config)",
    }
    return program(steps, str(folder), changes | (more_changes or {}), program_names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        names = lora_program(options.steps, options.rank, Path(folder))
        differences = compare_logprobs(names["trainer"])
        names["trainer"].train()
        found, all_tokens = rewards(names["trainer"]), torch.cat(differences)
        print(f"sampled answers: {mean(found[:3]):.2f} in the first three steps, {mean(found[-3:]):.2f} in the last")
        largest, average = all_tokens.max(), all_tokens.mean()
        print(f"log-probabilities of {len(all_tokens):,} tokens: at most {largest:.1e} apart, on average {average:.1e}")
        names["llm"].exit()


if __name__ == "__main__":
    main()
