"""Checks what a dependent kernel does before it waits, by reading the kernel's source (see dependent_launch.py).

The check runs when the kernel is defined, and assumes that the constexpr `PDL` is `True`. Pointer parameters are named
`*_ptr`, tuples of pointers `*_ptrs`, and tensor descriptors `*_tiles`. The check follows addresses from pointer
parameters through assignments and into called functions.
"""

import ast
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

ADDRESS_FUNCTIONS = ("multiple_of", "max_contiguous")  # of triton.language: they neither read nor write memory
ADDRESS_ENDINGS = ("_ptr", "_ptrs", "_tiles")  # endings of the names of parameters
WAITS = ("gdc_wait(PDL)", "gdc_launch_and_wait(PDL)")
CONSTANTS = ("dtype", "layout", "block_shape")  # attributes that are not addresses
COPY = "async_copy_global_to_shared"  # Gluon's load of a tile
PREFETCH = "prefetch_rows"  # only fills the L2 cache: the kernel reads the values after the wait


def check_early_reads(function: Callable, early: tuple[str, ...]) -> None:
    """Raise AssertionError if a kernel breaks the contract.

    The kernel must wait. Before its wait, the kernel must write nothing, and must read through exactly the pointer
    parameters `early`.
    """
    body = _Body(function)
    waits = body.run(body.node.body)
    name = function.__name__
    if not waits:
        raise AssertionError(f"{name}: never waits for the kernel before it")
    if body.reads != set(early):
        raise AssertionError(f"{name}: reads {sorted(body.reads)} before it waits, and declares {sorted(early)}")


class _Body:
    """The body of a kernel, or of a function that a kernel calls.

    The method `run` adds to the set `reads` all pointer parameters that the body reads before the wait.
    """

    def __init__(self, function: Callable, roots_of_arguments: list[set[str]] | None = None):
        self.function = function
        self.node = _functions_of(function.__code__.co_filename)[function.__code__.co_firstlineno]
        parameters = [argument.arg for argument in self.node.args.args]
        if roots_of_arguments is None:  # a kernel, not a function that it calls
            roots_of_arguments = [{name} if name.endswith(ADDRESS_ENDINGS) else set() for name in parameters]
        # local name -> its roots: the kernel's pointer parameters from which the name's value may be derived
        self.roots = dict(zip(parameters, roots_of_arguments))
        self.reads: set[str] = set()
        self.returned: set[str] = set()  # the roots of what the function returns

    def refuse(self, node: ast.AST, what: str) -> None:
        raise AssertionError(f"{self.function.__name__}: {what} before it waits: {ast.unparse(node)}")

    def run(self, statements: list[ast.stmt]) -> bool:
        """Check `statements` up to the wait. Return whether `statements` contain the wait of a dependent launch."""
        for statement in statements:
            if isinstance(statement, ast.If) and ast.unparse(statement.test) in ("PDL", "not PDL"):
                is_dependent = isinstance(statement.test, ast.Name)
                if self.run(statement.body if is_dependent else statement.orelse):
                    return True
            elif isinstance(statement, (ast.If, ast.For, ast.While)):
                self.run_conditional(statement)
            elif ast.unparse(statement) in WAITS:
                return True
            elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                self.assign(targets, self.address_roots(statement))
            elif isinstance(statement, ast.Return):
                self.returned |= self.address_roots(statement)
            else:
                self.address_roots(statement)
        return False

    def run_conditional(self, statement: ast.If | ast.For | ast.While) -> None:
        for _ in range(2):  # the second iteration of a loop may read addresses from the first
            if isinstance(statement, ast.For):
                self.assign([statement.target], self.address_roots(statement.iter))
            else:
                self.address_roots(statement.test)
            if self.run(statement.body) or self.run(statement.orelse):
                raise AssertionError(f"{self.function.__name__}: waits only under a condition")

    def assign(self, targets: Sequence[ast.expr], roots: set[str]) -> None:
        """Add `roots` (pointer parameters) to the roots of each assigned name.

        Old roots are kept, because the assignment might be in a branch that does not run.
        """
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    self.roots[node.id] = self.roots.get(node.id, set()) | roots

    def address_roots(self, node: ast.AST) -> set[str]:
        """Add to `self.reads` the pointer parameters whose memory `node` reads.

        Return the pointer parameters from which addresses in `node` are derived.
        """
        if isinstance(node, ast.Name):
            return self.roots.get(node.id, set())
        if isinstance(node, ast.Call):
            return self.call_roots(node)
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Attribute) and node.attr in CONSTANTS):
            for child in ast.iter_child_nodes(node):
                self.address_roots(child)
            return set()
        return set().union(*(self.address_roots(child) for child in ast.iter_child_nodes(node)))

    def call_roots(self, node: ast.Call) -> set[str]:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        roots_of = [self.address_roots(argument) for argument in arguments]
        name, roots = _called(node), set().union(*roots_of)
        is_method = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in ("tl", "gl")
        owner_roots = self.address_roots(node.func.value) if is_method else set()
        if name in ("load", COPY):
            read = owner_roots if is_method and name == "load" else roots_of[0]
            if not read and not is_method:
                self.refuse(node, "reads an address that is not derived from a parameter")
            self.reads |= read
            return set()
        if name == "store" or name.startswith("atomic") or (is_method and roots):
            self.refuse(node, "writes memory")
        if is_method:
            return owner_roots
        if not roots or name == PREFETCH:
            return set()
        return roots if name in ADDRESS_FUNCTIONS else self.function_roots(node, name, roots_of)

    def function_roots(self, node: ast.Call, name: str, roots_of: list[set[str]]) -> set[str]:
        """Check the body of a called function, given the roots (pointer parameters) of each argument of the call.

        Return the roots of the function's result.
        """
        callee = getattr(self.function.__globals__.get(name), "fn", None)
        if callee is None or node.keywords:
            self.refuse(node, "passes a pointer to a function that can't be checked")
        body = _Body(callee, roots_of)
        body.run(body.node.body)
        self.reads |= body.reads
        return body.returned


@cache
def _functions_of(file: str) -> dict[int, ast.FunctionDef]:
    nodes = [node for node in ast.parse(Path(file).read_text()).body if isinstance(node, ast.FunctionDef)]
    return {min(line.lineno for line in (node, *node.decorator_list)): node for node in nodes}


def _called(node: ast.AST) -> str:
    """Return the last part of a called function's dotted name, or "" if `node` is not a call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
