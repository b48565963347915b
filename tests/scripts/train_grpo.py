"""Train the bundled model by the program of `nanovllm/docs/training.md`, draw its rewards, and time its steps.

usage: python tests/scripts/train_grpo.py [--steps 20] [--timed-steps 20] [--picture .github/training.svg]

Prints the reward of greedy answers to questions that it was not trained on, before and after, and how far apart the
log-probabilities of trainer and engine are. Then a second training generates with this engine and, in every other
step, with transformers' `generate`, as GRPOTrainer does by default; median seconds of both are printed, and those of
the CPU, which depend less on what else the machine does. Needs TRL, and the extra `plot`.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch

from nanovllm import SamplingParams

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "nanovllm/docs/training.md"
ENGINE, TRANSFORMERS = "this engine", "transformers"


def program(
    steps: int, output_dir: str, changes: dict[str, str] | None = None, given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The names that the page's program has before its last line, which trains.

    The code is changed to so many steps, and by `changes`: what stands there, and what takes its place. The new code
    may use the names in `given`.
    """
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    first, last = code.split("trainer.train()")
    assert not last.strip()
    folder = f"= GRPOConfig({output_dir!r}, save_strategy='no', "
    settings = {"max_steps=20": f"max_steps={steps}", "= GRPOConfig(": folder}
    for shown, used in (settings | (changes or {})).items():
        assert shown in first
        first = first.replace(shown, used)
    names: dict[str, Any] = {**(given or {})}
    exec(first, names)
    return names


def greedy_reward(names: dict[str, Any]) -> float:
    """The mean reward of greedy answers to 100 questions that are not among those of the training."""
    llm, rng = names["llm"], names["rng"]
    state = rng.getstate()
    rows = [names["question"]() for _ in range(100)]
    rng.setstate(state)  # the same questions the next time
    params = SamplingParams(temperature=0, max_tokens=32)
    llm.load_weights(names["trainer"].model.named_parameters())
    outputs = llm.chat([row["prompt"] for row in rows], params, use_tqdm=False)
    return mean(names["reward"]([[{"content": output.text}] for output in outputs], [row["answer"] for row in rows]))


def compare_logprobs(trainer: Any) -> list[torch.Tensor]:
    """A list that gets, in each step, how far the engine's log-probabilities are from the trainer's, for each token."""
    differences: list[torch.Tensor] = []
    compute_loss = trainer._compute_loss

    def compare(model: Any, inputs: dict[str, Any]) -> Any:
        ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        size = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            logprobs, *_ = trainer._get_per_token_logps_and_entropies(model, ids, mask, size)
        found = (logprobs - inputs["sampling_per_token_logps"]).abs()
        differences.append(found[inputs["completion_mask"].bool()].cpu())
        return compute_loss(model, inputs)

    trainer._compute_loss = compare
    return differences


def rewards(trainer: Any) -> list[float]:
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def time_steps(trainer: Any) -> dict[str, tuple[float, ...]]:
    """For both engines in turn, median seconds of a step, and its generation in seconds and in those of the CPU.

    The first step of each does not count.
    """
    roll_out, generate = trainer.rollout_func, trainer._generate
    generating = defaultdict(list)

    def timed(prompts: list) -> Any:
        engine = (ENGINE, TRANSFORMERS)[trainer.state.global_step % 2]
        trainer.rollout_func = roll_out if engine == ENGINE else None
        begin, cpu_begin = perf_counter(), process_time()
        generated = generate(prompts)
        generating[engine].append((perf_counter() - begin, process_time() - cpu_begin))
        return generated

    trainer._generate = timed
    trainer.train()
    steps = [entry["step_time"] for entry in trainer.state.log_history if "step_time" in entry]
    return {
        engine: (median(steps[2 + i :: 2]), *map(median, zip(*generating[engine][1:])))
        for i, engine in enumerate((ENGINE, TRANSFORMERS))
    }


def draw(values: list[float], file: Path) -> None:
    from nanovllm.benchmarks.pictures import svg_pyplot

    plt = svg_pyplot()
    figure, axes = plt.subplots(figsize=(5, 2.4), layout="constrained")
    axes.plot(range(1, len(values) + 1), values, "o-", markersize=3, color="#1a7f5a")
    axes.set(xlabel="step", ylabel="mean reward of 64 answers", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timed-steps", type=int, default=20)
    parser.add_argument("--picture", type=Path, default=ROOT / ".github/training.svg")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        measure(arguments.steps, arguments.timed_steps, arguments.picture, folder)


def measure(steps: int, timed_steps: int, picture: Path, folder: str) -> None:
    names = program(steps, folder)
    differences = compare_logprobs(names["trainer"])
    before = greedy_reward(names)
    names["trainer"].train()
    found, all_tokens = rewards(names["trainer"]), torch.cat(differences)
    print(f"greedy answers to other questions: {before:.2f} before, {greedy_reward(names):.2f} after")
    print(f"sampled answers: {mean(found[:3]):.2f} in the first three steps, {mean(found[-3:]):.2f} in the last three")
    largest, average = all_tokens.max(), all_tokens.mean()
    print(f"log-probabilities of {len(all_tokens):,} tokens: at most {largest:.1e} apart, on average {average:.1e}")
    draw(found, picture)
    names["llm"].exit()
    names = program(timed_steps, folder)
    for engine, (step, generating, cpu) in time_steps(names["trainer"]).items():
        print(f"{engine}: {step:.2f} s per step, of which generation is {generating:.2f} s, or {cpu:.2f} s of the CPU")


if __name__ == "__main__":
    main()
