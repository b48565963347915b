"""What states in 16 bits cost in accuracy: `python tests/scripts/state_accuracy.py FOLDER`. Not a test.

Trains a small hybrid of Qwen3.5's architecture on one CPU core, in half an hour, unless FOLDER already has it. Measures
it with the engine, in a quarter of an hour. The output of the model's only attention layer is 0, so all information
about a text is in the states. A text has two parts:

- symbols. The one before determines their probabilities, by a table. Each text has a table of its own, so the model
  has to learn the table from the text. The perplexity of the symbols says how well the model does so.
- pairs of a key and a value, between the symbols. When a key comes again, its value is the same as before. So the model
  has to copy the value, over the distance from the key's first pair.

Weights are float32, so engines differ only in the dtype in which they store states between steps. Prompts are computed
in chunks, after each of which the state is rounded. Decoding rounds the state after each token: "decode" forces the
texts' tokens upon the sampler.
"""

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path
from shutil import copy

sys.path[:0] = [str(Path(__file__).parents[i]) for i in (1, 2)]  # tests, and the repository

import numpy as np
import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from nanovllm import LLM, SamplingParams
from nanovllm.delta_net.gated_delta_net import chunk_delta_rule
from nanovllm.utils.model_files import find_model

NUM_SYMBOLS, NUM_KEYS, NUM_VALUES = 16, 15, 16  # token ids: symbols, then keys, then values
CONCENTRATION = 0.15  # of the Dirichlet distribution of a table's rows
SHAPE = dict(
    vocab_size=64,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=3,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=8192,
    eos_token_id=None,
)
STAGES = (256, 16, 700), (1024, 4, 1500), (2048, 2, 300)  # tokens of a text, texts of a step, steps
DISTANCES = 500, 1000, 2000, 4000, 7800  # from a key's first pair to its second
LENGTH, NUM_LAST = 8000, 1000  # tokens of a measured text, and the last ones of them
DTYPES = "float32", "bfloat16", "float16"


class Texts:
    """Token ids [texts, length] and, in `kinds`, what each token is: a symbol, a copied value, or neither (0)."""

    SYMBOL, COPY = 1, 2

    def __init__(self, rng: np.random.Generator, pairs: np.ndarray):
        """`pairs` [texts, length] has the key of the pair that begins at a position, or -1."""
        num_texts, length = pairs.shape
        tables = rng.dirichlet([CONCENTRATION] * NUM_SYMBOLS, (num_texts, NUM_SYMBOLS)).cumsum(-1)
        values = NUM_SYMBOLS + NUM_KEYS + rng.integers(NUM_VALUES, size=(num_texts, NUM_KEYS))
        self.ids, self.kinds = np.zeros((2, num_texts, length), np.int64)
        every, last = np.arange(num_texts), rng.integers(NUM_SYMBOLS, size=num_texts)
        draws, shown = rng.random((length, num_texts, 1)), np.zeros((num_texts, NUM_KEYS), bool)
        key = np.full(num_texts, -1)  # of the pair whose value comes next
        for i in range(length):
            is_value = key >= 0
            is_key = ~is_value & (pairs[:, i] >= 0)
            following = (tables[every, last] < draws[i]).sum(1).clip(max=NUM_SYMBOLS - 1)
            last = np.where(is_value | is_key, last, following)
            self.ids[:, i] = np.where(is_value, values[every, key], np.where(is_key, NUM_SYMBOLS + pairs[:, i], last))
            self.kinds[:, i] = np.where(is_value, self.COPY * shown[every, key], self.SYMBOL * ~is_key)
            shown[every[is_value], key[is_value]] = True
            key = np.where(is_key, pairs[:, i], -1)


def texts_for_training(rng: np.random.Generator, num_texts: int, length: int) -> Texts:
    """Pairs are everywhere in half of the texts, and at the beginning and at the end of the others."""
    place = np.arange(length) / length
    rates = np.where(rng.random((num_texts, 1)) < 0.5, 0.1, 0.3 * ((place < 0.15) | (place > 0.85)))
    keys = rng.integers(NUM_KEYS, size=(num_texts, length))
    return Texts(rng, np.where(rng.random((num_texts, length)) < rates, keys, -1))


def texts_for_measuring(num_texts: int) -> tuple[Texts, dict[int, list[tuple[int, int]]]]:
    """All keys come at the beginning, and each comes again at one of the distances.

    Returns the texts, and the places (text, position) of the copied values by distance.
    """
    rng, places = np.random.default_rng(1), {distance: [] for distance in DISTANCES}
    pairs = np.full((num_texts, LENGTH), -1)
    for text, keys in enumerate(rng.permuted(np.tile(np.arange(NUM_KEYS), (num_texts, 1)), axis=1)):
        for i, key in enumerate(keys):
            first, distance = 8 * i, DISTANCES[i % len(DISTANCES)]
            pairs[text, [first, first + distance]] = key
            places[distance].append((text, first + distance + 1))
    return Texts(rng, pairs), places


def fast_delta_rule(query, key, value, g, beta, **_) -> tuple[torch.Tensor, None]:
    """Replaces transformers' definition, which takes several times as long."""
    query, key = (normalize(x, dim=-1) for x in (query, key))
    inputs = (x.transpose(0, 1).flatten(1, 2) for x in (query * query.shape[-1] ** -0.5, key, value, g, beta))
    q, k, v, log_decay, beta = inputs  # [tokens, texts * heads, ...]
    out, _ = chunk_delta_rule(q, k, v, log_decay, beta, v.new_zeros(v.shape[1], v.shape[2], k.shape[2]))
    return out.unflatten(1, (len(value), -1)).transpose(0, 1), None


def train(folder: Path) -> None:
    torch.manual_seed(0)
    rng, start = np.random.default_rng(0), time.perf_counter()
    modeling_qwen3_5.torch_chunk_gated_delta_rule = fast_delta_rule
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # transformers' weights are for layers that are much wider
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        for layer in model.model.layers[:2]:  # half-lives of 70 to 70,000 tokens
            layer.linear_attn.A_log.zero_()
            layer.linear_attn.dt_bias.copy_(torch.logspace(-5, -2, 4).expm1().log())
    model.model.layers[2].self_attn.o_proj.weight.requires_grad_(False)
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    num_steps = sum(steps for *_, steps in STAGES)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, num_steps, pct_start=0.05)
    for length, num_texts, steps in STAGES:
        for step in range(steps):
            texts = texts_for_training(rng, num_texts, length)
            ids, kinds = torch.from_numpy(texts.ids), torch.from_numpy(texts.kinds)[:, 1:]
            logits = model(ids[:, :-1], use_cache=False).logits
            losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(kinds.shape)
            symbols, copies = (losses[kinds == kind].mean() for kind in (Texts.SYMBOL, Texts.COPY))
            (symbols + copies).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            if step % 20 == 0:
                seconds = time.perf_counter() - start
                print(f"{seconds:.0f} s, {length} tokens, step {step}: symbols {symbols:.3f}, copies {copies:.3f}")
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # of the bundled model; not used
        copy(find_model("tiny-qwen3", None, with_weights=False) / file, folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, trained in {time.perf_counter() - start:.0f} s")


def logprobs_of_chunks(llm: LLM, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """For each token but the first of each text: its log-probability, and whether it was found most likely."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(texts.ids.tolist(), params, use_tqdm=False)
    found = [[probs[token] for token, probs in zip(x.prompt_token_ids[1:], x.prompt_logprobs[1:])] for x in outputs]
    logprobs, ranks = (np.array([[getattr(x, name) for x in row] for row in found]) for name in ("logprob", "rank"))
    return logprobs, ranks == 1


def logprobs_of_decodes(llm: LLM, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """The same. The first token of each text is a prompt, and all texts decode their other tokens together."""
    ids, logprobs, are_first = torch.from_numpy(texts.ids), [], []

    def choose(module, inputs, logits: torch.Tensor) -> torch.Tensor:
        """Replace logits, so that each text's next token is sampled."""
        following = ids[:, len(logprobs) + 1 : len(logprobs) + 2]
        logprobs.append(logits.log_softmax(1).gather(1, following))
        are_first.append(logits.argmax(1, keepdim=True) == following)
        return torch.zeros_like(logits).scatter_(1, following, 1.0)

    hook = llm.model_runner.model.lm_head.register_forward_hook(choose)
    params = SamplingParams(temperature=0.0, max_tokens=ids.shape[1] - 1, ignore_eos=True, detokenize=False)
    outputs = llm.generate(ids[:, :1].tolist(), params, use_tqdm=False)
    hook.remove()
    assert [output.outputs[0].token_ids for output in outputs] == ids[:, 1:].tolist()
    return torch.cat(logprobs, 1).double().numpy(), torch.cat(are_first, 1).numpy()


def best_perplexity(texts: Texts) -> float:
    """Of the symbols, for a reader who knows how texts are made, and counts what followed each symbol."""
    losses = []
    for ids, kinds in zip(texts.ids, texts.kinds):
        counts, symbols = np.full((NUM_SYMBOLS, NUM_SYMBOLS), CONCENTRATION), ids[kinds == Texts.SYMBOL]
        for last, symbol in pairwise(symbols):
            losses.append(-np.log(counts[last, symbol] / counts[last].sum()))
            counts[last, symbol] += 1
    return float(np.exp(np.mean(losses)))


def measure(folder: Path, num_texts: int, steps: list[str]) -> None:
    texts, places = texts_for_measuring(num_texts)
    is_symbol = texts.kinds[:, 1:] == Texts.SYMBOL
    print(f"{num_texts} texts; best perplexity: {best_perplexity(texts):.3f}; chance: {NUM_SYMBOLS}\n")
    names = [f"copies over {DISTANCES[0]:,}", *(f"{distance:,}" for distance in DISTANCES[1:])]
    print(f"| tokens of a step | states | perplexity | of the last {NUM_LAST:,} | {' | '.join(names)} |")
    print("| --- " * (4 + len(names)) + "|")
    for step in steps:
        for dtype in DTYPES:
            chunk = 2048 if step == "decode" else int(step)
            settings = dict(max_num_batched_tokens=chunk, max_num_seqs=num_texts, max_model_len=LENGTH + 1)
            settings |= dict(device="cpu", dtype="float32", mamba_ssm_cache_dtype=dtype, enable_prefix_caching=False)
            with LLM(str(folder), **settings) as llm:
                logprobs, are_first = (logprobs_of_decodes if step == "decode" else logprobs_of_chunks)(llm, texts)
            perplexities = [np.exp(-logprobs[:, -n:][is_symbol[:, -n:]].mean()) for n in (LENGTH, NUM_LAST)]
            right = [are_first[tuple(np.array(places[distance]).T - [[0], [1]])].mean() for distance in DISTANCES]
            columns = *(f"{x:.3f}" for x in perplexities), *(f"{x:.1%}" for x in right)
            print(f"| {step} | {dtype} | {' | '.join(columns)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-texts", type=int, default=32, help="of 8,000 tokens each")
    parser.add_argument("--steps", nargs="+", default=["64", "decode"], help="'decode', or the tokens of a chunk")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    if not (args.folder / "config.json").exists():
        train(args.folder)
    measure(args.folder, args.num_texts, args.steps)


if __name__ == "__main__":
    main()
