"""Makes Triton's interpreter faster: most of its time goes to what is the same in each operation of each program."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

BUILDER, SEMANTIC = interpreter.interpreter_builder, interpreter.interpreter_semantic
NOT_REPLAYED = object()


class Recorder:
    """Takes the place of the builder while an operation of triton.language first meets arguments of some types.

    The operation checks and converts its arguments, which depends on their types alone, and calls functions of the
    builder, which work on arrays. Slots hold the arrays of its arguments, constants, and what the calls return.
    """

    def __init__(self, operands: list[TensorHandle]):
        self.slots, self.num_operands = [*operands], len(operands)
        self.slot_of = {id(handle): slot for slot, handle in enumerate(operands)}
        self.constants, self.calls, self.is_complete = set(), {}, True

    def __getattr__(self, name: str):
        function = getattr(BUILDER, name)
        return (lambda *args, **kwargs: self.call(name, function, args, kwargs)) if callable(function) else function

    def call(self, name: str, function: Callable, args: tuple, kwargs: dict):
        self.is_complete &= not kwargs
        result = function(*args, **kwargs)
        slots = [self.slot(arg) for arg in args]
        out = self.add(result)
        if self.constants.issuperset(slots) and result is not None and "program" not in name:
            self.constants.add(out)
        else:
            self.calls[out] = function, self.without_broadcasts(function, slots, result)
        return result

    def slot(self, arg: object) -> int:
        if (slot := self.slot_of.get(id(arg))) is None:
            parts = arg if isinstance(arg, list | tuple) else [arg]
            self.is_complete &= not any(isinstance(part, TensorHandle) for part in parts)  # nobody knows from where
            self.constants.add(slot := self.add(arg))
        return slot

    def add(self, value: object) -> int:
        self.slots.append(value)
        slot = len(self.slots) - 1
        if isinstance(value, TensorHandle):
            self.slot_of[id(value)] = slot
        return slot

    def without_broadcasts(self, function: Callable, slots: list[int], result: object) -> list[int]:
        """The slots of arguments; functions of NumPy broadcast them without being told."""
        if function.__name__ != "<lambda>" or not {"binary_op", "ternary_op"} & {*function.__code__.co_names}:
            return slots
        sources = [self.source(slot) for slot in slots]
        shape = np.broadcast_shapes(*(self.slots[slot].data.shape for slot in sources))
        return sources if shape == result.data.shape else slots

    def source(self, slot: int) -> int:
        function, slots = self.calls.get(slot, (None, ()))
        position = {"create_broadcast": 0, "create_splat": 1}.get(getattr(function, "__name__", None))
        return slot if position is None else slots[position]

    def replay(self, result: object):
        """A function from the arrays of arguments to the operation's result, with the calls that this needs."""
        tensors = [x for x in (result if type(result) is tuple else (result,)) if getattr(x, "handle", x) is not None]
        if not self.is_complete or any(type(x) is not tl.tensor or id(x.handle) not in self.slot_of for x in tensors):
            return NOT_REPLAYED
        of_tensors = {self.slot_of[id(x.handle)]: vars(x) for x in tensors}
        scope = {"tensor_like": tensor_like} | {f"like{slot}": attributes for slot, attributes in of_tensors.items()}
        lines, needed = [], {*of_tensors}
        for slot, (function, args) in reversed(self.calls.items()):
            if slot in needed or self.slots[slot] is None:  # it stores something
                lines.insert(0, f" x{slot} = call{slot}({', '.join(f'x{arg}' for arg in args)})")
                scope[f"call{slot}"] = function
                needed.update(args)
        scope |= {f"x{slot}": self.slots[slot] for slot in needed & self.constants}
        made = [f"tensor_like(like{slot}, x{slot})" for slot in (self.slot_of[id(x.handle)] for x in tensors)]
        made = f"({', '.join(made)},)" if type(result) is tuple else (made or [None])[0]
        operands = ", ".join(f"x{slot}" for slot in range(self.num_operands))
        exec("\n".join([f"def replay({operands}):", *lines, f" return {made}"]), scope)
        return scope["replay"]


def tensor_like(attributes: dict, handle: TensorHandle) -> tl.tensor:
    tensor = object.__new__(tl.tensor)
    tensor.__dict__ = attributes | {"handle": handle}
    return tensor


def key_of(arg: object, operands: list[TensorHandle]):
    """Arguments with the same key are treated alike; that of a tensor is its type, and its array joins `operands`."""
    kind = type(arg)
    if kind is tl.tensor:
        operands.append(arg.handle)
        return arg.type.name
    if kind is int or kind is bool or kind is str or arg is None:
        return kind, arg
    if kind is tl.constexpr:
        return kind, key_of(arg.value, operands)
    if kind is tuple or kind is list or kind is tl.tuple:
        return kind, *[key_of(x, operands) for x in arg]
    if isinstance(arg, tl.dtype):
        return kind, arg.name
    if kind is float or kind is slice or kind is tl.PropagateNan:
        return kind, repr(arg)  # zeros have signs
    raise TypeError


def checked_once(function: Callable) -> Callable:
    """An operation of triton.language whose checks and conversions are made once for arguments of the same types."""
    replays = {}

    def operation(*args, _semantic=None, **kwargs):
        if SEMANTIC.builder is not BUILDER:  # a part of an operation that is recorded
            return function(*args, _semantic=SEMANTIC, **kwargs)
        operands = []
        try:
            key = tuple([key_of(x, operands) for x in args])
            if kwargs:
                key += tuple([(name, key_of(x, operands)) for name, x in kwargs.items()])
        except TypeError:  # descriptors
            return function(*args, _semantic=SEMANTIC, **kwargs)
        if (replay := replays.get(key)) is None:
            slot_of = {id(handle): slot for slot, handle in enumerate(operands)}
            if len(slot_of) < len(operands):  # x * x is no record for x * y, while x * y is one for x * x
                key = key, *[slot_of[id(handle)] for handle in operands]
                replay = replays.get(key)
        if replay is None:
            SEMANTIC.builder = recorder = Recorder(operands)
            try:
                result = function(*args, _semantic=SEMANTIC, **kwargs)
            finally:
                SEMANTIC.builder = BUILDER
            replays[key] = recorder.replay(result)
            return result
        return function(*args, _semantic=SEMANTIC, **kwargs) if replay is NOT_REPLAYED else replay(*operands)

    return operation


def patch_once() -> None:
    """At each launch all members of triton.language would be replaced, and at its end restored."""
    operation = cache(checked_once)

    def patch_builtin(package, builder, *scope) -> None:
        for name, member in inspect.getmembers(package):
            if tl.core.is_builtin(member):
                setattr(package, name, operation(getattr(member, "__wrapped__", member)))

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)


def trust_arrays() -> None:
    """Frequent functions of the builder: without checks of sizes, and without arrays that are the same each time."""
    builder, dtypes, dtype_of = interpreter.InterpreterBuilder, {}, interpreter._get_np_dtype
    binary_op, constant, is_bool = builder.binary_op, cache(np.full), np.dtype(bool)

    def np_dtype(dtype: tl.dtype) -> np.dtype:
        if (found := dtypes.get(dtype.name)) is None:
            found = dtypes[dtype.name] = dtype_of(dtype)
        return found

    def init_handle(self, data, dtype) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}

    def binary(self, lhs, rhs, op):
        if lhs.data.dtype is is_bool and rhs.data.dtype is is_bool:  # to Triton numbers of one bit
            return binary_op(self, lhs, rhs, op)
        dtype, output = lhs.dtype.scalar, op(lhs.data, rhs.data)
        if output.itemsize > max(dtype.primitive_bitwidth // 8, 1):
            output = output.astype(np_dtype(dtype))
        return TensorHandle(output, dtype)

    def masked_load(self, ptr, mask, other, *policy, **policies):
        dtype = ptr.get_element_ty()
        other = constant(ptr.data.shape, 0, np_dtype(dtype)) if other is None else other.data
        return TensorHandle(interpreter._interpreter.load(ptr.data, mask.data, other, np_dtype(dtype)), dtype)

    def load(self, ptr, *policy):
        return masked_load(self, ptr, TensorHandle(constant(ptr.data.shape, True), tl.int1), None)

    def store(self, ptr, value, *policy):
        return interpreter._interpreter.store(ptr.data, value.data, constant(ptr.data.shape, True))

    def broadcast(self, arg, shape):
        data = np.empty(shape, arg.data.dtype)
        data[...] = arg.data
        return TensorHandle(data, arg.dtype.scalar)

    def expand_dims(self, arg, axis):
        return TensorHandle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    if not BUILDER.options.debug:  # which reports that integers overflow
        BUILDER.options = replace(BUILDER.options, sanitize_overflow=False)
    interpreter._get_np_dtype, TensorHandle.__init__ = np_dtype, init_handle
    builder.binary_op, builder.create_masked_load = binary, masked_load
    builder.create_load, builder.create_store = load, store
    builder.create_broadcast, builder.create_expand_dims = broadcast, expand_dims


def reduce_once() -> None:
    """nanmax looks for NaN first and compares then, and each result would have a type of its own."""
    min_max, types = interpreter.ReduceOps.min_max, {}
    functions = {np.nanmin: np.fmin.reduce, np.nanmax: np.fmax.reduce}

    def min_max_once(self, input, val_reduce_op, idx_reduce_op=None):
        return min_max(self, input, functions.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    def to_tensor(self, values, dtype):
        values = np.asarray(values)
        handle = TensorHandle(np.atleast_1d(values).astype(interpreter._get_np_dtype(dtype), copy=False), dtype.scalar)
        if (like := types.get((dtype.name, values.shape))) is None:
            kind = tl.block_type(dtype, [*values.shape]) if values.shape else dtype
            like = types[dtype.name, values.shape] = vars(tl.tensor(handle, kind))
        return tensor_like(like, handle)

    interpreter.ReduceOps.min_max, interpreter.ReduceScanOpInterface.to_tensor = min_max_once, to_tensor


def speed_up() -> None:
    patch_once()
    trust_arrays()
    reduce_once()
    if triton.__version__.startswith("3.4."):  # takes strides of elements for bytes when it checks their alignment
        interpreter.TensorDescHandle.validate = lambda descriptor: None
