"""Makes Triton's interpreter faster: most of its time goes to what is the same in each operation of each program."""

import inspect
from dataclasses import replace
from functools import cache

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


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
        return lambda *args, _semantic=None, **kwargs: function(*args, _semantic=semantic, **kwargs)

    def patch_lang_once(fn):
        if any(lang.load is originals[lang] for lang in modules_of(fn)):
            return patch_lang(fn)
        return None  # nobody asks for the scope of a device function

    semantic = interpreter.interpreter_semantic
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


def trust_handles_and_shapes() -> None:
    """The size of each array's numbers is compared with that of its type, and all sizes of a shape are unwrapped."""
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
    convert_operands_once()
    if triton.__version__.startswith("3.4."):  # takes strides of elements for bytes when it checks their alignment
        interpreter.TensorDescHandle.validate = lambda descriptor: None
