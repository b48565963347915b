"""What a method of drafting has to do: each has a file of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name

from nanovllm.engine.sequence import Sequence


@dataclass
class Drafts:
    """What a step's host side knows of the drafts of a sequence: `seq.feature_state["spec_decode"]`."""

    token_ids: list[int] = field(default_factory=list)  # -1: the device drafts it
    is_new: bool = True  # no step has brought a draft of it to the device since it was admitted
    is_behind: bool = True  # it has no drafts, or had none in the last step: what drafts on the device must catch up


class Proposer:
    """Drafts on the host, from the tokens that have reached it: the sequences wait for these.

    It may be wrong, and may find nothing: no draft changes a text. It is made with a SpeculativeConfig.
    """

    on_host = True  # False: the device drafts `num_drafts` tokens, and `draft` is not called

    def __init__(self, settings):
        self.settings = settings

    def draft(self, seq: Sequence, num_drafts: int) -> list[int]:
        """At most so many tokens that may follow `seq.token_ids`."""
        raise NotImplementedError

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended."""

    def reset(self) -> None:
        """All sequences are gone."""


class DeviceProposer(Proposer):
    """Stands for what drafts on the device: `spec_decode/speculation.py` has that."""

    on_host = False


# by method: a class, or module:class
PROPOSERS: dict[str, str | Callable[..., Proposer]] = {
    "ngram": "nanovllm.spec_decode.ngram:NGram",
    "suffix": "nanovllm.spec_decode.suffix:Suffix",
    "draft_model": DeviceProposer,
    "eagle3": DeviceProposer,
    "mtp": DeviceProposer,
}


def make_proposer(settings) -> Proposer:
    found = PROPOSERS[settings.method]
    return (resolve_name(found) if isinstance(found, str) else found)(settings)
