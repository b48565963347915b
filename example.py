"""Sends four prompts to the bundled model, or to another one: `python example.py --model Qwen/Qwen3-0.6B`."""

import argparse
import logging
import signal

from nanovllm.utils.model_files import check_model

QUESTIONS = ["What is 17 + 25?", "list all prime numbers within 100", "introduce yourself"]
VERSE = "HAMLET.\nTo be, or not to be"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the program at once
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-qwen3", help="a folder, a hub id, or the bundled tiny-qwen3")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--attention-backend", default="auto", choices=["auto", "triton", "flash", "sdpa"])
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    settings = vars(parser.parse_args())
    model, max_tokens, temperature = (settings.pop(name) for name in ("model", "max_tokens", "temperature"))

    try:
        check_model(model)
        from nanovllm import LLM, SamplingParams  # not at the top, because importing PyTorch takes seconds

        logging.basicConfig(format="%(message)s")
        logging.getLogger("nanovllm").setLevel(logging.INFO)  # the engine logs one line when it has started
        llm = LLM(model, **settings)
    except (ValueError, TypeError, OSError) as error:  # of a setting, or of the model's files
        parser.exit(2, f"{error}\n")
    with llm:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = llm.chat(conversations, params, use_tqdm=False) + llm.generate(VERSE, params, use_tqdm=False)
    for question, answer in zip([*QUESTIONS, VERSE], answers):
        print(f"\n> {question}\n{answer['text']}")


if __name__ == "__main__":
    main()
