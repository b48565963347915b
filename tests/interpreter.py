"""Makes Triton's interpreter faster: most of its time goes to what is the same in each operation of each program."""

import inspect
from dataclasses import replace
from functools import cache

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

BINARY = {f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod") for side in ("", "r")}
BINARY |= {f"__{name}__" for name in ("and", "or", "lt", "le", "gt", "ge", "eq", "ne")} | {"minimum", "maximum"}


class Form:
    """What a tensor is besides its numbers."""

    def __init__(self, tensor: tl.tensor):
        self.tensor, self.handle = vars(tensor), vars(tensor.handle)
        self.np_dtype = interpreter._get_np_dtype(tensor.handle.dtype)

    def fill(self, data: np.ndarray) -> tl.tensor:
        if data.itemsize > self.np_dtype.itemsize:
            data = data.astype(self.np_dtype)
        handle, tensor = object.__new__(interpreter.TensorHandle), object.__new__(tl.tensor)
        handle.__dict__ = self.handle | {"data": data, "attr": {}}
        tensor.__dict__ = self.tensor | {"handle": handle}
        return tensor


def is_plain(dtype: tl.dtype) -> bool:
    """NumPy has such numbers."""
    return not (dtype.is_ptr() or dtype.is_bf16() or dtype.is_fp8())


def repeat_operators():
    """An operator on tensors is one function of NumPy, which is known when operands of the same types come again."""
    builder, semantic, performed = interpreter.InterpreterBuilder, interpreter.interpreter_semantic, []
    binary_op, add_bytes = builder.binary_op, cache(lambda size: lambda ptrs, n: ptrs + size * n.astype(np.uint64))
    pick = (lambda x, y: x.handle.data), (lambda x, y: y.handle.data)

    def noted_binary_op(self, lhs, rhs, op):
        performed.append((lhs, rhs, op, binary_op(self, lhs, rhs, op)))
        return performed[-1][-1]

    def create_addptr(self, ptr, offset):
        return self.binary_op(ptr, offset, add_bytes(max(1, ptr.get_element_ty().primitive_bitwidth // 8)))

    def create_idiv(self, lhs, rhs):
        return self.binary_op(lhs, rhs, lambda x, y: (x - np.fmod(x, y)) // y)

    def key_of(x):
        return x.type.name if type(x) is tl.tensor else (type(x), repr(x))

    def sources_of(operands, x, y) -> list | None:
        """Functions from the arguments of an operator to NumPy's: one may be a number, or be converted."""
        handles = [getattr(z, "handle", None) for z in (x, y)]
        which = [next((i for i, handle in enumerate(handles) if handle is operand), None) for operand in operands]
        if {0, 1} <= {*which}:
            return [pick[i] for i in which]
        if which.count(None) != 1 or handles[0] is handles[1]:
            return None
        made = which.index(None)
        data, of = operands[made].data, pick[i := 1 - which[1 - made]]
        if handles[i] is None:
            source = lambda x, y: data
        elif is_plain(handles[i].dtype) and is_plain(operands[made].dtype):
            source = lambda x, y: of(x, y).astype(data.dtype)
        else:
            return None
        return [source, pick[1 - i]] if made == 0 else [pick[1 - i], source]

    def repeated(function):
        known = {}

        def operate(x, y, _semantic=None, **flags):
            key = key_of(x), key_of(y), *flags.items()
            if found := known.get(key):
                form, op, lhs, rhs = found
                return form.fill(op(lhs(x, y), rhs(x, y)))
            performed.clear()
            result = function(x, y, _semantic=semantic, **flags)
            if len(performed) == 1 and getattr(result, "handle", None) is performed[0][-1]:
                *operands, op, _ = performed[0]
                is_bits = all(operand.data.dtype == bool for operand in operands)  # Triton's overflow, and NumPy's not
                sources = sources_of(operands, x, y)
                if sources and (not is_bits or op.__name__.startswith("bitwise")):
                    known[key] = Form(result), op, *sources
            return result

        return operate

    builder.binary_op, builder.create_addptr, builder.create_idiv = noted_binary_op, create_addptr, create_idiv
    return repeated


def repeat_indexing(function):
    """`x[:, None]` and the like."""
    known = {}

    def index(x, slices, _semantic=None):
        key = x.type.name, repr(slices)
        if form := known.get(key):
            return form.fill(x.handle.data[slices])
        result = function(x, slices, _semantic=interpreter.interpreter_semantic)
        if x.type.is_block() and type(slices) is tuple:
            known[key] = Form(result)
        return result

    return index


def convert_once() -> None:
    """Of types that come again, it is known what they are broadcast and cast to."""
    broadcast, broadcasts, cast, casts = TritonSemantic.broadcast_impl_value, {}, TritonSemantic.cast, {}

    def broadcast_known(self, *tensors):
        key = tuple([x.type.name for x in tensors])
        if not (forms := broadcasts.get(key)):
            results = broadcast(self, *tensors)
            broadcasts[key] = [x is not y and Form(y) for x, y in zip(tensors, results)]
            return results
        return [
            form.fill(np.broadcast_to(x.handle.data, form.tensor["type"].shape)) if form else x
            for x, form in zip(tensors, forms)
        ]

    def cast_known(self, x, dtype, *rounding):
        key = x.type.name, dtype.scalar.name, *rounding
        if key not in casts:
            result = cast(self, x, dtype, *rounding)
            if result is x:
                casts[key] = None
            elif is_plain(x.dtype) and is_plain(dtype.scalar) and not any(rounding):
                casts[key] = Form(result)
            return result
        form = casts[key]
        return form.fill(x.handle.data.astype(form.np_dtype)) if form else x

    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_known, cast_known


def replace_builtins_once() -> None:
    """For each call of a device function, all members of triton.language are replaced, as the kernel did before."""
    patch_lang, originals = interpreter._patch_lang, {tl: tl.load, tl.core: tl.core.load}
    builtins = cache(lambda package: [x for x in inspect.getmembers(package) if tl.core.is_builtin(x[1])])
    modules_of = cache(lambda fn: [lang for lang in originals if any(x is lang for x in fn.__globals__.values())])

    def patch_builtin(package, builder, *scope) -> None:
        set_attr = scope[0].set_attr if scope else setattr
        for name, member in builtins(package):
            if getattr(package, name) is member:
                set_attr(package, name, in_interpreter(getattr(member, "__wrapped__", member)))

    @cache
    def in_interpreter(function):
        if function.__name__ in BINARY:
            return repeated(function)
        if function.__name__ == "__getitem__":
            return repeat_indexing(function)
        return lambda *args, _semantic=None, **kwargs: function(*args, _semantic=semantic, **kwargs)

    def patch_lang_once(fn):
        if any(lang.load is originals[lang] for lang in modules_of(fn)):
            return patch_lang(fn)
        return None  # nobody asks for the scope of a device function

    semantic, repeated = interpreter.interpreter_semantic, repeat_operators()
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang_once


def make_types_once() -> None:
    """For each tensor its type and shape are made anew, and for each operation a table of dtypes."""
    init_block_type, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    unwrap, equals, dtype_of = tl.core._unwrap_if_constexpr, tl.dtype.__eq__, cache(interpreter._get_np_dtype)
    block_types, never_constexpr = {}, {tl.tensor, tl.dtype, int, float, bool, str, type(None)}

    def np_dtype(dtype):
        """Takes blocks too, and pointers, which have no hash."""
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

    def init_handle(self, data, dtype):
        self.data, self.dtype, self.attr = data, dtype, {}

    interpreter.TensorHandle.__init__ = init_handle
    tl.block_type.__init__ = init_block_type_once
    tl.tensor.__init__ = init_tensor_once
    tl.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    tl.core._unwrap_if_constexpr = lambda x: x if type(x) in never_constexpr else unwrap(x)
    interpreter._get_np_dtype = np_dtype


def convert_operands_once() -> None:
    """For each operator, types of its operands are compared, and numbers become blocks.

    Integers overflow as they do elsewhere: only debug mode reports that.
    """
    check, types, constants = TritonSemantic.binary_op_type_checking_impl, {}, {}

    def check_once(self, lhs, rhs, *flags, **options):
        is_tensor = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        of_lhs = lhs.type.name if is_tensor[0] else (type(lhs), repr(lhs))
        of_rhs = rhs.type.name if is_tensor[1] else (type(rhs), repr(rhs))
        key = of_lhs, of_rhs, flags, *options.items()
        if found := types.get(key):  # NumPy broadcasts the arrays
            return self.tensor(lhs.handle, found[0]), self.tensor(rhs.handle, found[1])
        if key in constants:
            return (lhs, constants[key]) if is_tensor[0] else (constants[key], rhs)
        operands = check(self, lhs, rhs, *flags, **options)
        is_same = [x.dtype.name == y.dtype.name for x, y, known in zip((lhs, rhs), operands, is_tensor) if known]
        if all(is_same):  # without a conversion
            if len(is_same) == 2:
                types[key] = [x.type for x in operands]
            elif len(is_same) == 1:
                constants[key] = operands[is_tensor[0]]
        return operands

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    TritonSemantic.binary_op_type_checking_impl = check_once


def speed_up() -> None:
    convert_once()
    replace_builtins_once()
    make_types_once()
    convert_operands_once()
    if triton.__version__.startswith("3.4."):  # takes strides of elements for bytes when it checks their alignment
        interpreter.TensorDescHandle.validate = lambda descriptor: None
