"""Makes Triton's interpreter faster, which spends most of its time on work that is the same in each program."""

import inspect
import operator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter


def replace_builtins_once() -> None:
    """Patch triton.language once. Triton patches and restores all members for each kernel and device function call."""
    patch_lang = interpreter._patch_lang
    builtins = cache(lambda package: [x for x in inspect.getmembers(package) if tl.core.is_builtin(x[1])])

    def patch_builtin(package, builder, *scope) -> None:
        set_attr = scope[0].set_attr if scope else setattr
        for name, member in builtins(package):
            if getattr(package, name) is member:
                set_attr(package, name, in_interpreter(getattr(member, "__wrapped__", member)))

    @cache
    def in_interpreter(function):
        run = lambda *args, _semantic=None, **kwargs: function(*args, _semantic=semantic, **kwargs)
        name = function.__qualname__.removeprefix("tensor.")
        return on_tape(run, name) if name in OF_TYPES else run

    @cache
    def patch_lang_once(fn):
        patch_lang(fn)
        return SimpleNamespace(restore=lambda: None)

    semantic = interpreter.interpreter_semantic
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang_once


def make_types_once() -> None:
    """Cache types, shapes and dtypes. Triton makes them anew for each tensor, and a table of dtypes per operation."""
    init_block_type, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    unwrap, equals, dtype_of = tl.core._unwrap_if_constexpr, tl.dtype.__eq__, cache(interpreter._get_np_dtype)
    block_types, never_constexpr = {}, {tl.tensor, tl.dtype, int, float, bool, str, type(None)}

    def np_dtype(dtype):
        """Return the NumPy dtype. Also takes blocks, and pointers, which have no hash."""
        dtype = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(dtype, tl.pointer_type) else dtype_of(dtype)

    def init_block_type_once(self, element_ty, shape) -> None:
        key = element_ty.name, *(x.value if type(x) is tl.constexpr else x for x in shape)
        if (facts := block_types.get(key)) is None:
            init_block_type(self, element_ty, shape)
            facts = block_types[key] = vars(self) | {"of_tensors": []}
        vars(self).update(facts, element_ty=element_ty)

    def init_tensor_once(self, handle, type) -> None:
        facts = vars(type).setdefault("of_tensors", [])
        if facts:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = facts
        else:
            init_tensor(self, handle, type)
            facts += self.shape, self.numel

    tl.block_type.__init__ = init_block_type_once
    tl.tensor.__init__ = init_tensor_once
    tl.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    tl.core._unwrap_if_constexpr = lambda x: x if type(x) in never_constexpr else unwrap(x)
    interpreter._get_np_dtype = np_dtype


# operations whose builder calls depend only on the types of their tensors
REVERSIBLE = "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"
OPERATORS = *REVERSIBLE, *(f"r{name}" for name in REVERSIBLE), "neg", "invert", "lshift", "rshift"
COMPARISONS = "lt", "le", "gt", "ge", "eq", "ne"
OF_TYPES = {f"__{name}__" for name in (*OPERATORS, *COMPARISONS, "getitem")}
OF_TYPES |= {"logical_and", "logical_or", "minimum", "maximum", "where", "fma", "clamp", "abs", "exp", "exp2", "log"}
OF_TYPES |= {"log2", "rsqrt", "sqrt", "ceil", "floor", "cast", "to", "expand_dims", "broadcast_to", "reshape", "trans"}
OF_TYPES |= {"permute", "full", "arange", "load", "store", "dot"}
REPEATED = {"create_splat": 1, "create_broadcast": 0, "create_expand_dims": 0}  # index of the repeated array


class Tape:
    """Records the builder calls of an operation, which are the same for all operands of these types.

    Each handle and constant has a slot. The first slots are the handles of the operands.
    """

    def __init__(self, builder, operands: list):
        self.builder, self.num_operands = builder, len(operands)
        self.slots, self.calls, self.sources = [*operands], [], {}
        self.indices = {id(handle): i for i, handle in enumerate(operands)}
        self.binary_op = None  # the arguments of the last one

    def __getattr__(self, name):
        method = getattr(self.builder, name)

        def call(*args):
            self.binary_op = None
            result = method(*args)
            function = of_arrays(name, method, args, self.binary_op, result)
            if name in REPEATED:
                source = args[REPEATED[name]]
                self.sources[id(result)] = self.sources.get(id(source), source)
            if self.binary_op or name in ("create_addptr", "create_select"):  # NumPy repeats arrays
                args = [self.sources.get(id(x), x) for x in args]
            self.calls.append((function, [*map(self.index, args)], self.add(result)))
            return result

        return call if name.startswith("create_") else method

    def index(self, x) -> int:
        return self.indices[id(x)] if id(x) in self.indices else self.add(x)

    def add(self, x) -> int:
        self.indices[id(x)] = len(self.slots)
        self.slots.append(x)
        return self.indices[id(x)]

    def end(self, result: tl.tensor):
        """Return a function that makes the calls that the result needs, for other operands."""
        last, calls, needed = self.index(result.handle), [], {self.index(result.handle)}
        for call in reversed(self.calls):
            if call[2] in needed:
                needed.update(call[1])
                calls.insert(0, call)
        made = {slot for _, _, slot in self.calls}
        scope = {f"x{i}": x for i, x in enumerate(self.slots) if i >= self.num_operands and i not in made}
        scope |= {f"call{i}": function for i, (function, _, _) in enumerate(calls)} | {"make": maker_of(result)}
        listed = lambda slots: ", ".join(f"x{i}" for i in slots)
        lines = [f"x{slot} = call{i}({listed(arguments)})" for i, (_, arguments, slot) in enumerate(calls)]
        exec(f"def play({listed(range(self.num_operands))}): {'; '.join([*lines, f'return make(x{last})'])}", scope)
        return scope["play"]


def maker_of(example: tl.tensor):
    """Return a function from handles to tensors of the same type as `example`."""
    kind, dtype, shape, numel = example.type, example.dtype, example.shape, example.numel

    def make(handle) -> tl.tensor:
        x = object.__new__(tl.tensor)
        x.handle, x.type, x.dtype, x.shape, x.numel = handle, kind, dtype, shape, numel
        return x

    return make


def of_arrays(name, method, args, binary_op, result):
    """Return a method of the builder without its work on types, which has the same result for arguments like these."""
    handle, load = interpreter.TensorHandle, interpreter._interpreter.load
    if binary_op and all(map(operator.is_, binary_op, args)):
        function, kind, dtype = binary_op[2], result.data.dtype, result.dtype
        if not args[0].data.dtype == args[1].data.dtype == bool or function.__name__.startswith("bitwise"):

            def compute(lhs, rhs):
                array = function(lhs.data, rhs.data)
                return handle(array if array.dtype is kind else array.astype(kind), dtype)

            return compute
    if name == "create_addptr":
        size = max(1, args[0].get_element_ty().primitive_bitwidth // 8)
        return lambda pointers, x: handle(pointers.data + size * x.data.astype(np.uint64), pointers.dtype)
    if name in ("create_load", "create_masked_load"):
        dtype, kind, shape = result.dtype, result.data.dtype, result.data.shape
        zeros, everywhere = np.zeros(shape, kind), np.ones(shape, bool)
        if name == "create_load":
            return lambda pointers, *_: handle(load(pointers.data, everywhere, zeros, kind), dtype)
        if args[2] is None:
            return lambda pointers, mask, *_: handle(load(pointers.data, mask.data, zeros, kind), dtype)
        return lambda pointers, mask, other, *_: handle(load(pointers.data, mask.data, other.data, kind), dtype)
    return method


def on_tape(operation, name: str):
    """Wrap a function of the language, so that work on types, conversions and constants is done only once."""
    builder, semantic, tapes = interpreter.interpreter_builder, interpreter.interpreter_semantic, {}

    def described(x):
        kind = type(x)
        if kind is tl.tensor:
            return x.type.name
        if kind is tl.constexpr:
            x = x.value
            kind = type(x)
        return (kind, x) if kind is int else x.name if isinstance(x, tl.dtype) else (kind, repr(x))

    def copy(x):
        """Copy a tensor, so that no two operands are the same object."""
        return tl.tensor(interpreter.TensorHandle(x.handle.data, x.handle.dtype), x.type) if type(x) is tl.tensor else x

    def play(*args, _semantic=None, **options):
        if semantic.builder is not builder:  # called within another operation
            return operation(*args, **options)
        values = (*args, *options.values()) if options else args
        key = (*map(described, values), *options)
        if played := tapes.get(key):
            return played(*[x.handle for x in values if type(x) is tl.tensor])
        of_masked = options.get("other", (*args, None, None)[2]) if name == "load" else None
        if type(of_masked) is tl.tensor and args[0].handle.data.size == 1:  # a scalar, whose value matters
            return operation(*args, **options)
        args, options = [*map(copy, args)], {option: copy(x) for option, x in options.items()}
        operands = [x.handle for x in (*args, *options.values()) if type(x) is tl.tensor]
        semantic.builder = tape = Tape(builder, operands)
        try:
            result = operation(*args, **options)
        finally:
            semantic.builder = builder
        tapes[key] = tape.end(result)
        return result

    return play


def record_operations() -> None:
    """Note binary operations for the tape, and let integers overflow silently, except in debug mode."""
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    binary_op = type(builder).binary_op

    def noted_binary_op(self, lhs, rhs, op):
        if semantic.builder is not self:
            semantic.builder.binary_op = lhs, rhs, op
        return binary_op(self, lhs, rhs, op)

    type(builder).binary_op = noted_binary_op
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def trust_handles_and_shapes() -> None:
    """Skip checks: Triton compares the item size of each array with its type, and unwraps all sizes of each shape."""
    equals, constexprs = tl.tuple.__eq__, {same: tl.constexpr(same) for same in (False, True)}

    def init_handle(self, data, dtype) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}

    def is_equal(self, other):
        return constexprs[self.values == other.values] if type(other) is tl.tuple else equals(self, other)

    interpreter.TensorHandle.__init__, tl.tuple.__eq__ = init_handle, is_equal


def speed_up() -> None:
    replace_builtins_once()
    make_types_once()
    trust_handles_and_shapes()
    record_operations()
    if triton.__version__.startswith("3.4."):  # its check of alignment takes strides in elements for bytes
        interpreter.TensorDescHandle.validate = lambda descriptor: None
        count = interpreter.InterpreterBuilder.create_histogram  # returns int64 instead of int32

        def create_histogram(self, data, bins, mask):
            counts = count(self, data, bins, mask)
            return interpreter.TensorHandle(counts.data.astype(np.int32), tl.int32)

        interpreter.InterpreterBuilder.create_histogram = create_histogram
