"""Print what conversations with a model that keeps states find in the prefix cache, by how many there are.

    python tests/scripts/hits_of_conversations.py --states 48

Nothing is computed: a simulated engine gives every sequence a token in each step. A conversation has six turns, of 50
to 300 tokens of a question and as many of an answer. What is found is divided by what attention alone would find, with
as many blocks as are needed. `sequences` is how many may run, for `--states` in all; `run` is how many do.
"""

import argparse
import heapq
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from simulation import SimulatedEngine

BLOCK_SIZE, TURNS, MAX_LEN = 64, 6, 4096


def converse(num_states: int, num_seqs: int, num_conversations: int, pause: float) -> tuple[float, float]:
    """The fraction that is found, and how many sequences run on average.

    pause: the mean of the steps between an answer and the next question. Each conversation is followed by another.
    """
    rng, now, num_running = random.Random(0), 0, 0
    sizes = dict(num_blocks=num_conversations * MAX_LEN // BLOCK_SIZE, block_size=BLOCK_SIZE, max_len=MAX_LEN)
    budgets = dict(max_num_batched_tokens=4096, max_num_mixed_tokens=1024)
    states = dict(keeps_states=True, max_num_seqs=num_seqs, num_snapshots=num_states - num_seqs)
    engine = SimulatedEngine(**sizes, **budgets, **states)
    turns = {i: (0, []) for i in range(2 * num_conversations)}  # how many there were, and the tokens
    questions = [(rng.random() * max(pause, 300), i) for i in range(num_conversations)]  # when, of which conversation
    heapq.heapify(questions)
    others, answers = [*range(num_conversations, 2 * num_conversations)], {}
    found = findable = 0
    while questions or answers:
        while questions and questions[0][0] <= now:
            _, i = heapq.heappop(questions)
            num_turns, history = turns[i]
            prompt = history + [rng.randrange(50_000) for _ in range(rng.randint(50, 300))]
            answers[i] = engine.add(prompt, max_tokens=rng.randint(50, 300), ignore_eos=True)
            findable += (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE if history else 0  # its last was not computed
        if not answers:
            now = questions[0][0]
            continue
        engine.step(token_id=rng.randrange(50_000))
        now += 1
        num_running += len(engine.scheduler.running)
        for i in [i for i, seq in answers.items() if seq.is_finished]:
            seq, num_turns = answers.pop(i), turns[i][0] + 1
            found += seq.num_cached_tokens
            turns[i] = num_turns, seq.token_ids
            following = i if num_turns < TURNS else others.pop() if others else None
            if following is not None:
                heapq.heappush(questions, (now + rng.expovariate(1) * pause, following))
    return found / findable, num_running / len(engine.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=48)
    parser.add_argument("--sequences", type=int, help="how many may run (three quarters of the states)")
    parser.add_argument("--pauses", type=float, nargs="*", default=[0, 200, 1000], help="means, in steps")
    args = parser.parse_args()
    num_seqs = args.sequences or args.states - 1 - args.states // 4
    print(f"{args.states} states, {num_seqs} sequences")
    print("pause  conversations  found  run")
    for pause in args.pauses:
        for per_state in (1 / 3, 1 / 2, 2 / 3, 5 / 6, 1, 5 / 4):
            num_conversations = round(per_state * args.states)
            found, run = converse(args.states, num_seqs, num_conversations, pause)
            print(f"{pause:5.0f}  {num_conversations:13}  {found:5.0%}  {run:3.0f}", flush=True)


if __name__ == "__main__":
    main()
