"""Separate block tables for layers with a window, so that blocks before the window can be freed.

If only some layers have a window, the layers are divided among several block tables. Table 0 contains the layers
without a window. A block has space for the keys and values of one table's layers, so each table can use any block.
Layers with a window may store more or fewer bytes per token than layers without a window. In place of one layer with
more bytes per token, a block can store several layers with fewer bytes per token. The code in engine/window_blocks.py
frees blocks before the window.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanovllm.cache.kv_cache import AttentionSpec, cache_type

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner

Shape = tuple[int, int]  # kv_heads, head_dim


class TableView(NamedTuple):
    """Maps the block ids of a table to the block ids of a layer's cache.

    The layer's cache divides each block of the table into `factor` blocks. The layer uses one of these `factor` blocks:
    block `id` of the table is block `factor * id + offset` of the layer's cache.
    """

    table: int  # index of the table in each of the sequence's `window_columns`, or -1 for its `block_table`
    factor: int
    offset: int


@dataclass(frozen=True)
class DividedSpec(AttentionSpec):
    """The spec of layers that are divided among block tables. Layers of different tables share memory.

    `num_kv_heads` and `head_dim` are those of the layers that store the most bytes per token.
    """

    layers_per_block: int = 0  # for layers of this shape
    shapes: tuple[Shape, ...] = ()  # of all layers

    def tensors(self, num_layers: int, num_blocks: int, config: "Config") -> tuple[torch.Tensor, ...]:
        """Return the tensors. Layers of all shapes share the first tensor. Scales have a separate tensor for each
        shape.
        """
        dims = 2, min(num_layers, self.layers_per_block), num_blocks, config.kvcache_block_size
        sizes = {(self.num_kv_heads * self.head_dim // head_dim, head_dim) for _, head_dim in self.shapes}
        found = [cache_type(config.kv_cache_dtype).tensors((*dims, *size), config.dtype) for size in sorted(sizes)]
        return found[0][:1] + tuple(scales for tensors in found for scales in tensors[1:])


def divide_layers(runner: "ModelRunner") -> None:
    """Give separate tables to layers with a window, if this reduces the memory that the longest sequence needs.

    All layers with a window must store keys and values of one shape. All layers without a window must share one shape,
    too. The larger shape must be a multiple of the smaller shape. The runner's model must be loaded before
    `divide_layers` is called. Sets `Config.num_window_tables`, `Config.cache_window`, `Config.table_views` and each
    layer's `table`. Merges the runner's `cache_groups`.
    """
    config, groups = runner.config, runner.cache_groups
    windows = {spec: layers for spec, layers in groups.items() if getattr(spec, "window", None) is not None}
    full = [spec for spec in groups if isinstance(spec, AttentionSpec) and spec not in windows]
    if len(full) != 1 or len(groups) != 1 + len(windows) or len({*map(cache_shape, windows)}) != 1:
        return
    shapes = cache_shape(full[0]), cache_shape(next(iter(windows)))
    sizes = [num_heads * head_dim for num_heads, head_dim in shapes]
    largest = max(sizes)
    if largest % min(sizes):
        return
    full_layers, layers = groups[full[0]], [layer for found in windows.values() for layer in found]
    full_factor, factor = (largest // size for size in sizes)
    per_block = -(-len(full_layers) // full_factor)
    num_tables, window = -(-len(layers) // (per_block * factor)), max(spec.window for spec in windows)
    num_blocks, block_size = config.max_blocks_per_seq, config.kvcache_block_size
    num_columns = min(num_blocks, -(-(window - 1) // block_size) + 1)
    together = (len(full_layers) * sizes[0] + len(layers) * sizes[1]) * num_blocks
    if per_block * largest * (num_blocks + num_tables * num_columns) >= together:
        return
    views = [TableView(table, factor, offset) for table in range(num_tables) for offset in range(factor)]
    for i, layer in enumerate(layers):
        layer.table = 1 + i // per_block
    if full_factor > 1:
        for i, layer in enumerate(full_layers):
            layer.table = 1 + len(views) + i // per_block
        views += [TableView(-1, full_factor, offset) for offset in range(full_factor)]
    divided = DividedSpec(*shapes[sizes.index(largest)], layers_per_block=per_block, shapes=shapes)
    for spec in (full[0], *windows):
        del groups[spec]
    groups[divided] = full_layers + layers
    assert len(views) <= config.model_config.max_table_views, "messages to ranks have space for this many"
    config.resolve(num_window_tables=num_tables, cache_window=window, table_views=tuple(views))


def cache_shape(spec: AttentionSpec) -> Shape:
    return spec.num_kv_heads, spec.head_dim


def view_tables(views: tuple[TableView, ...], columns: Any, block_table: Any) -> np.ndarray:
    """Return an array [views, W] of the block ids that the layers of each TableView use.

    Each element of `columns` contains the block ids of one column, one id for each window table. `columns` may be
    shorter than `block_table` [W].
    """
    ids = np.zeros((len(views), len(block_table)), np.int32)
    for row, (table, factor, offset) in zip(ids, views):
        seen = block_table if table < 0 else [column[table] for column in columns]
        row[: len(seen)] = np.array(seen, np.int32) * factor + offset
    return ids


def place_windows(tables: Any, batch: Any, block_size: int) -> None:
    """After `place_decodes`, fill in the window tables and window slots of a batch's decode rows.

    `tables` is a `RequestTables`, and `batch` is a `Batch`, both on the device. The host has already filled in the rows
    of chunks. CUDA graphs contain this function, so it never waits for the device.
    """
    shape, requests = batch.shape, tables.window_tables  # [requests, window tables, W + 1]
    k, num_rows, width = shape.tokens_per_row, shape.num_decode_rows, shape.max_blocks_per_seq
    num_decodes = batch.num_decode_rows if shape.is_padded else num_rows
    req_indices = batch.req_indices[: num_rows // k].long()
    columns = batch.new_blocks[:, :1].long() % requests.shape[2]  # [S, 1]; -1: the last column, which is never read
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
