"""Block tables for layers with a window, whose old blocks can then be freed.

If only some layers have a window, the layers are divided into tables of equally many layers. Table 0 contains the
layers without a window. A block stores the keys and values of one table's layers, so any table can use any block.
engine/window_blocks.py decides which blocks are freed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.cache.kv_cache import AttentionSpec
from nanovllm.utils.context import get_context

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner


@dataclass(frozen=True)
class DividedSpec(AttentionSpec):
    """The spec of layers that are divided among block tables. Layers of different tables share memory."""

    layers_per_table: int = 0

    def tensors(self, num_layers: int, num_blocks: int, config: "Config") -> tuple[torch.Tensor, ...]:
        return super().tensors(min(num_layers, self.layers_per_table), num_blocks, config)


def divide_layers(runner: "ModelRunner") -> None:
    """Give layers with a window tables of their own, if the longest sequence then needs fewer bytes.

    All layers must store keys and values of the same shape. The runner's model must be loaded. Sets
    `Config.num_window_tables`, `Config.cache_window` and each layer's `table`, and merges the runner's `cache_groups`.
    """
    config, groups = runner.config, runner.cache_groups
    windows = {spec: layers for spec, layers in groups.items() if getattr(spec, "window", None) is not None}
    full = [spec for spec in groups if isinstance(spec, AttentionSpec) and spec not in windows]
    if len(full) != 1 or len(groups) != 1 + len(windows) or not windows:
        return
    if any(cache_shape(spec) != cache_shape(full[0]) for spec in windows):
        return
    layers, num_full = [layer for found in windows.values() for layer in found], len(groups[full[0]])
    num_tables, window = -(-len(layers) // num_full), max(spec.window for spec in windows)
    num_blocks, block_size = config.max_blocks_per_seq, config.kvcache_block_size
    num_columns = min(num_blocks, -(-(window - 1) // block_size) + 1)
    if num_full * (num_blocks + num_tables * num_columns) >= (num_full + len(layers)) * num_blocks:
        return
    for i, layer in enumerate(layers):
        layer.table = 1 + i // num_full
    divided = DividedSpec(*cache_shape(full[0]), layers_per_table=num_full)
    groups[divided] = groups.pop(full[0]) + layers
    for spec in windows:
        del groups[spec]
    config.resolve(num_window_tables=num_tables, cache_window=window)


def cache_shape(spec: AttentionSpec) -> tuple[int, int]:
    return spec.num_kv_heads, spec.head_dim


def set_window_contexts(rows: Iterable[Any], block_size: int, int_tensor: Any) -> None:
    """Set the step's context for each window table. `rows` contains (sequence, start, end) for each row of the step."""
    rows, context = [*rows], get_context()
    for t in range(len(rows[0][0].window_columns[-1])):
        tables = [[column[t] for column in seq.window_columns] for seq, _, _ in rows]
        slots = [
            table[i // block_size] * block_size + i % block_size
            for table, (_, start, end) in zip(tables, rows)
            for i in range(start, end)
        ]
        width = max(map(len, tables))
        padded = int_tensor([table + [0] * (width - len(table)) for table in tables])
        of_table = replace(context, slot_mapping=int_tensor(slots), block_tables=padded, plans={}, window_contexts=[])
        context.window_contexts.append(of_table)


def place_windows(tables: Any, batch: Any, block_size: int) -> None:
    """Fill in the window tables and slots of a batch's decode rows, after `place_decodes`.

    `tables` is a `RequestTables`, and `batch` a `Batch`, both on the device. The host has filled in the chunks. CUDA
    graphs contain this function, so it never waits for the device.
    """
    shape, requests = batch.shape, tables.window_tables  # [requests, window tables, W + 1]
    k, num_rows, width = shape.tokens_per_row, shape.num_decode_rows, shape.max_blocks_per_seq
    num_decodes = batch.num_decode_rows if shape.is_padded else num_rows
    req_indices = batch.req_indices[: num_rows // k].long()
    columns = batch.new_blocks[:, :1].long() % requests.shape[2]  # [S, 1]; -1 is the last column, which absorbs it
    is_real = torch.arange(num_rows // k, device=requests.device)[:, None] * k < num_decodes
    columns = torch.where(is_real, columns, requests.shape[2] - 1)
    requests[req_indices[:, None], :, columns] = batch.new_window_blocks[:, None]
    rows = requests[req_indices, :, :width].repeat_interleave(k, 0).transpose(0, 1)  # [window tables, rows, W]
    is_decode = torch.arange(num_rows, device=requests.device) < num_decodes
    positions = torch.where(is_decode, batch.positions[:num_rows], 0).long()
    blocks = rows.gather(2, (positions // block_size).expand(len(rows), -1).unsqueeze(2)).squeeze(2)
    slots = torch.where(batch.slot_mapping[:num_rows] < 0, -1, blocks * block_size + positions % block_size)
    batch.window_slots[:, :num_rows] = torch.where(is_decode, slots, batch.window_slots[:, :num_rows]).int()
    batch.window_tables[:, :num_rows] = torch.where(is_decode[:, None], rows, batch.window_tables[:, :num_rows])
