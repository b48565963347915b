"""Teach the bundled model to sort in descending order, as a LoRA adapter in PEFT's format; takes minutes on a CPU.

usage: python tests/scripts/teach_adapter.py OUT_DIR [--steps 400] [--rank 4]

Prints the loss, and the fraction of lists that the adapter sorts without an error. They are not among those of the
training. The adapter in `nanovllm/assets/` was made with the defaults.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.utils.model_files import BUNDLED

BASE, ROWS, LEARNING_RATE, ALPHA = str(BUNDLED / "tiny-qwen3"), 24, 4e-3, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Adapted(nn.Module):
    """A linear layer with an adapter, which begins without any effect."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base, self.scale = base, ALPHA / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


def question(rng: random.Random) -> tuple[str, str]:
    numbers = rng.sample(range(100), rng.randint(3, 7))
    return "Sort: " + ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers, reverse=True)))


def batch(tokenizer, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [rows, length], and labels: -100 where the loss does not count."""
    rows = []
    for _ in range(ROWS):
        text, answer = question(rng)
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = [tokenizer.encode(part, add_special_tokens=False) for part in (prompt, answer + tokenizer.eos_token)]
        rows.append((ids[0] + ids[1], [-100] * len(ids[0]) + ids[1]))
    length = max(len(ids) for ids, _ in rows)
    padded = [[x + [padding] * (length - len(x)) for x, padding in zip(row, (0, -100))] for row in rows]
    return tuple(torch.tensor(part) for part in zip(*padded))  # type: ignore[return-value]


def train(steps: int, rank: int) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors, with PEFT's names."""
    torch.manual_seed(0)
    tokenizer, rng = AutoTokenizer.from_pretrained(BASE), random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).requires_grad_(False)
    adapted = {}
    for name, layer in [*model.named_modules()]:
        parent, _, last = name.rpartition(".")
        if last in TARGETS:
            adapted[name] = Adapted(layer, rank)
            setattr(model.get_submodule(parent), last, adapted[name])
    optimizer = torch.optim.AdamW([p for layer in adapted.values() for p in (layer.a, layer.b)], weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 20) * (1 - step / steps)
        ids, labels = batch(tokenizer, rng)
        loss = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    matrices = {name: {"A": layer.a, "B": layer.b} for name, layer in adapted.items()}
    return {
        f"base_model.model.{name}.lora_{kind}.weight": matrix.detach().half().contiguous()
        for name, both in matrices.items()
        for kind, matrix in both.items()
    }


def accuracy(folder: Path) -> float:
    """The fraction of 200 lists that are sorted without an error."""
    rng = random.Random(1)
    questions = [question(rng) for _ in range(200)]
    with LLM("tiny-qwen3", dtype="float32", enable_lora=True, max_model_len=128) as llm:
        chats = [[{"role": "user", "content": text}] for text, _ in questions]
        adapter = LoRARequest("descending", 1, str(folder))
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False, lora_request=adapter)
    return sum(output.text == answer for output, (_, answer) in zip(outputs, questions)) / len(questions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rank", type=int, default=4)
    options = parser.parse_args()
    tensors = train(options.steps, options.rank)
    options.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.folder / "adapter_model.safetensors")
    config = {
        "base_model_name_or_path": "tiny-qwen3",
        "bias": "none",
        "lora_alpha": ALPHA,
        "peft_type": "LORA",
        "r": options.rank,
        "target_modules": TARGETS,
        "task_type": "CAUSAL_LM",
    }
    (options.folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"sorted without an error: {accuracy(options.folder):.1%}")


if __name__ == "__main__":
    main()
