"""What an addition touches: each is made in a copy of the package, in the files that CONTRIBUTING.md names."""

import json
import re
import shutil
from pathlib import Path

import pytest
from common import TINY, run_with_copy
from test_readme import DOCUMENTS, STATE, section, table

import nanovllm

ROOT = Path(nanovllm.__file__).parent

# by the name in CONTRIBUTING.md: new files with their contents, and edits of others as (what is there, a line after it)
ADDITIONS = {
    "a model family": {
        "models/toy.py": """
from nanovllm.models.qwen3 import Qwen3ForCausalLM
class ToyForCausalLM(Qwen3ForCausalLM):
    pass
""",
    },
    "an attention backend": {
        "attention/toy.py": """
from nanovllm.attention.sdpa import SDPABackend
class ToyBackend(SDPABackend):
    pass
""",
    },
    "a format of weights": {
        "quantization/formats/int6.py": """
import torch
from nanovllm.quantization.quant_config import ALL, QuantConfig
from nanovllm.quantization.scaled import QuantScheme
def config_on_load():
    return QuantConfig("int6", (((ALL,), QuantScheme(torch.int8, 31.0, 1, None)),))
""",
    },
    "a feature": {
        "features/new.py": """
from dataclasses import dataclass
from nanovllm import SamplingParams
from nanovllm.engine.features import StepFeature
from nanovllm.features import register_feature
@dataclass(frozen=True, kw_only=True)
class Params(SamplingParams):
    banned_id: int = 0
class BannedId(StepFeature):
    fields = ("banned_id",)
    def edit_logits(self, logits, rows):
        ids = rows.column("banned_id").long()
        logits.scatter_(1, ids[:, None], logits.gather(1, ids[:, None]).masked_fill(ids[:, None] > 0, float("-inf")))
register_feature(BannedId)
""",
    },
    "a feature as a parameter of every request": {
        "features/only_id.py": """
from nanovllm.engine.features import StepFeature
class OnlyId(StepFeature):
    fields = ("only_id",)
    def edit_logits(self, logits, rows):
        wanted = rows.column("only_id").long()
        rest = wanted[:, None] != rows.column("only_id").new_tensor(range(logits.shape[1])).long()
        logits.masked_fill_(rest & (wanted > 0)[:, None], float("-inf"))
""",
        "engine/features.py": ("FEATURES = {", '"only_id": _feature("features.only_id:OnlyId", "only_id"),'),
        "sampling_params.py": (
            "    temperature: float = checked(1.0, check_real, low=0)",
            "only_id: int = checked(0, check_int, low=0)",
        ),
        "kernels/sampling/sampling_columns.py": ("float is float32, which is stored as its bits", '"only_id": int,'),
        "serve/protocol.py": ("    temperature: float | None = None", "only_id: int | None = None"),
    },
    "operations of another device": {
        "kernels/new.py": """
from nanovllm.kernels import register_ops
calls = []
def silu_and_mul(x):
    calls.append(len(x))
    return NotImplemented
register_ops("cpu", globals())
""",
    },
    "a layer with a state": {"layers/new.py": STATE},
}
# one after the other, as each start of Python takes seconds; the last two change what comes after them
PROGRAM = """
import sys
import torch
from nanovllm import LLM, SamplingParams
from nanovllm.serve.protocol import CompletionBody, sampling_params

original, toy = sys.argv[1:]
def ids(model=original, kind=SamplingParams, sampling={}, **settings):
    with LLM(model, device="cpu", dtype="float32", max_model_len=256, **settings) as llm:
        params = kind(temperature=0, max_tokens=6, ignore_eos=True, **sampling)
        return llm.generate("HAMLET.", params, use_tqdm=False)[0].token_ids
expected = ids()

assert ids(toy) == expected, "a model family"
assert ids(attention_backend="toy") == expected, "an attention backend"
assert len(ids(quantization="int6")) == 6, "a format of weights"
assert ids(sampling={"only_id": 7}) == [7] * 6 != expected, "a feature as a parameter of every request"
assert sampling_params(CompletionBody(prompt="x", only_id=7), {}, None).only_id == 7, "the same over HTTP"

from nanovllm.features.new import Params
banned = ids(kind=Params, sampling={"banned_id": expected[0]})
assert banned[0] != expected[0] and expected[0] not in banned and ids(kind=Params) == expected, "a feature"

from nanovllm.kernels.new import calls
assert ids() == expected and calls, "operations of another device"

from nanovllm.layers.new import DecayedSum
from nanovllm.models.qwen3 import Qwen3ForCausalLM as Model
make, forward, read = Model.__init__, Model.forward, Model.read_config
def make_both(self, config, *args):
    make(self, config, *args)
    self.sum = DecayedSum(config.hidden_size)
Model.__init__ = make_both
Model.read_config = staticmethod(lambda *args: read(*args) | {"keeps_states": True})
Model.forward = lambda self, *args: (x := forward(self, *args)) + 0 * self.sum(x)
assert ids() == expected, "a layer with a state"
Model.forward = lambda self, *args: self.sum(forward(self, *args))
assert ids() != expected, "a layer with a state"
"""


def test_table_lists_what_is_touched():
    rows = table(section(DOCUMENTS[".github/CONTRIBUTING.md"], "What an addition touches"))
    listed = {re.findall(r"\[(.*?)\]", name)[0]: re.findall("`(.*?)`", files) for name, _, files in rows}
    for name, touched in ADDITIONS.items():
        new = [f"{Path(file).parent}/" for file, change in touched.items() if isinstance(change, str)]
        assert listed[name] == new + [file for file, change in touched.items() if not isinstance(change, str)]
    assert listed.keys() == ADDITIONS.keys()
    assert [int(number) for _, number, _ in rows] == [*map(len, ADDITIONS.values())]


def test_additions(tmp_path):
    pytest.importorskip("pydantic")
    copy = tmp_path / "nanovllm"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("docs"))
    for touched in ADDITIONS.values():
        for file, change in touched.items():
            if isinstance(change, str):
                assert not (copy / file).exists()
                (copy / file).write_text(change)
            else:
                before, line = change
                source = (copy / file).read_text()
                assert before in source, file
                (copy / file).write_text(source.replace(before, f"{before}\n    {line}", 1))
    shutil.copytree(TINY, tmp_path / "toy")
    config = json.loads((tmp_path / "toy" / "config.json").read_text())
    config |= {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
    (tmp_path / "toy" / "config.json").write_text(json.dumps(config))
    run_with_copy(PROGRAM, tmp_path, TINY, str(tmp_path / "toy"))
