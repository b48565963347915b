"""Defines the interface of drafting methods."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name

from nanovllm.engine.sequence import Sequence


@dataclass
class Drafts:
    """Records what the host knows about a sequence's drafts. Stored in `seq.feature_state["spec_decode"]`."""

    token_ids: list[int] = field(default_factory=list)  # -1: a token that the device drafts
    is_new: bool = True  # no step has drafted for the sequence since it was admitted
    is_behind: bool = True  # there was a step without drafts, so a drafter on the device must catch up


class Proposer:
    """Makes drafts on the host. A sequence must wait until its last token has reached the host.

    A proposer may draft wrong tokens or no tokens. `settings` is a `SpeculativeConfig`.
    """

    on_host = True  # False: the device drafts `num_drafts` tokens, and `draft` is not called

    def __init__(self, settings):
        self.settings = settings

    def draft(self, seq: Sequence, num_drafts: int) -> list[int]:
        """Return at most `num_drafts` tokens that are likely to follow `seq.token_ids`."""
        raise NotImplementedError

    def forget(self, seq: Sequence) -> None:
        """Forget `seq`, which has ended."""

    def reset(self) -> None:
        """Forget all sequences."""


class DeviceProposer(Proposer):
    """A placeholder for a drafter on the device. `spec_decode/speculation.py` calls the actual drafter."""

    on_host = False


# by method: a class, or "module:class"
PROPOSERS: dict[str, str | Callable[..., Proposer]] = {
    "ngram": "nanovllm.spec_decode.ngram:NGram",
    "suffix": "nanovllm.spec_decode.suffix:Suffix",
    "draft_model": DeviceProposer,
    "eagle3": DeviceProposer,
    "mtp": DeviceProposer,
}


def make_proposer(settings) -> Proposer:
    proposer = PROPOSERS[settings.method]
    return (resolve_name(proposer) if isinstance(proposer, str) else proposer)(settings)
