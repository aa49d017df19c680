"""Recognises loss functions that make the same calls of torch for all tensors of the same kinds.

Such a function has no branches and no loops. It reads nothing but its two arguments, their attributes, constants and
functions of torch, so that no state of Python can change what it does.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Mapping
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from ..capture.recorded.recording.tables import words

# What neither jumps nor reads or writes anything beyond the function's own variables. Instructions that another version
# of Python has beside these only make a function one of which nothing is known.
_OWN = words(
    "RESUME NOP CACHE PRECALL PUSH_NULL KW_NAMES CALL CALL_KW RETURN_VALUE RETURN_CONST POP_TOP COPY SWAP "
    "LOAD_CONST LOAD_SMALL_INT LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW_LOAD_FAST_BORROW "
    "STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST BINARY_OP BINARY_SUBSCR BINARY_SLICE COMPARE_OP "
    "UNARY_NEGATIVE UNARY_INVERT BUILD_TUPLE BUILD_SLICE"
)


def code_of_straight_line(function: Any) -> tuple[Any, ...]:
    """Return the code of such a function and the functions that it calls: while these stay, its calls do.

    Empty for a function that may make other calls for tensors of the same kinds, or does not have two arguments.
    """
    if type(function) is not FunctionType or function.__defaults__ or function.__kwdefaults__:
        return ()
    names = _global_names(function.__code__)
    if names is None:
        return ()
    called = [_function_of_torch(name, function.__globals__) for name in sorted(names)]
    return () if None in called else (function.__code__, *called)


@lru_cache(maxsize=256)
def _global_names(code: CodeType) -> frozenset[tuple[str, ...]] | None:
    """Return the dotted global names that a function reads; None if it does more than to read them and to call."""
    if code.co_freevars or code.co_cellvars or code.co_exceptiontable or code.co_kwonlyargcount:
        return None
    names: set[tuple[str, ...]] = set()
    dotted: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and dotted:
            dotted = (*dotted, step.argval)
            continue
        names.add(dotted)
        dotted = (step.argval,) if step.opname == "LOAD_GLOBAL" else ()
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if not hasattr(Tensor, step.argval):
                return None
        elif step.opname not in _OWN and not dotted:
            return None
    return frozenset(names - {()})


def _function_of_torch(dotted: tuple[str, ...], names: Mapping[str, Any]) -> Any:
    """Return the function of torch with a name, or ``len``; None for the name of anything else."""
    value = names.get(dotted[0], getattr(builtins, dotted[0], None))
    for name in dotted[1:]:
        if not isinstance(value, ModuleType) or value.__name__.partition(".")[0] != "torch":
            return None
        value = getattr(value, name, None)
    home = getattr(value, "__module__", None) or ""
    is_function = isinstance(value, FunctionType | BuiltinFunctionType)
    return value if value is len or (is_function and home.partition(".")[0] == "torch") else None
