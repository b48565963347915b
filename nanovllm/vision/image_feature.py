"""Tells all ranks the positions of a step's tokens, and which tokens belong to images."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.features import Arrays, StepFeature
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.vision.prompt_images import images_in, images_of

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner


def has_images(step: ScheduledStep) -> bool:
    """Return whether any chunk of the step begins before the end of the last image of its prompt.

    After the last image of a prompt, the three positions of a token are equal.
    """
    chunks = [(images_of(seq), start) for seq, start, _ in step.chunks]
    return any(images is not None and start < images.placed[-1].end for images, start in chunks)


class RequestImages(StepFeature):
    """The state of this feature for a sequence is the sequence's PromptImages. A sequence without images has no state.

    A VisionRunner uses this feature in all steps with chunks. Each new sequence sends its `delta` (see PromptImages),
    because an earlier sequence with the same request index may have left another `delta`.
    """

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        """Return `req_indices` and `deltas` of the requests.

        If `has_images(step)` is True, also return `positions` and `placed`.

        positions: the positions [3, T] of the step's tokens; -1 for tokens that are decoded.
        placed: [N, 7], with one row for each part of an image. A row contains the first token's index in the step, the
            number of tokens, the first token's index in the image, and the image's key.
        """
        if not (seqs := step.prompt_seqs):
            return None
        deltas = [0 if (images := images_of(seq)) is None else images.delta for seq in seqs]
        req_indices = [seq.req_index for seq in seqs]
        arrays = {"req_indices": np.array(req_indices, np.int32), "deltas": np.array(deltas, np.int32)}
        if has_images(step):
            positions, placed, token = [np.full((3, step.num_decode_tokens), -1, np.int32)], [], step.num_decode_tokens
            for seq, start, end in step.chunks:
                if (images := images_of(seq)) is None:
                    positions.append(np.broadcast_to(np.arange(start, end, dtype=np.int32), (3, end - start)))
                else:
                    positions.append(images.positions(start, end))
                    for image, first in images_in(seq, start, end):
                        begin, stop = max(start, first), min(end, first + image.num_tokens)
                        placed.append((token + begin - start, stop - begin, begin - first, *image.key))
                token += end - start
            arrays["positions"] = np.concatenate(positions, 1)
            arrays["placed"] = np.array(placed, np.int32).reshape(-1, 7)
        return arrays

    @classmethod
    def max_words(cls, config: "Config") -> int:
        if config.model_config.vision is None:
            return 0
        return 2 * config.max_num_seqs + (3 + 7) * config.max_num_batched_tokens + 4 * 4

    @classmethod
    def forget(cls, seq: Sequence) -> None:
        """Free the pixels now, because the ended sequence stays in memory until garbage is collected."""
        seq.feature_state["vision"] = None

    def __init__(self, runner: "ModelRunner"):
        self._runner: Any = runner

    def upload(self, arrays: Arrays) -> None:
        self._runner.set_positions(arrays)
