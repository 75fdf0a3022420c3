# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, three times as fast, for processes in which every kernel is interpreted.

It computes what it did (`tests/kernels/test_interpreter.py`). An interpreted kernel of the tests
has a few dozen elements, so what it costs is what the interpreter does around NumPy: it puts its
own functions into Triton's language at each launch and at each call of a function within a kernel,
which takes milliseconds, and derives the same shapes and types for each operation anew.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """Keep what the interpreter finds out again and again. For good, and for the whole process."""
    _patch_language_once()
    _keep_types()
    _keep_shapes()
    _look_for_no_overflow()


def _look_for_no_overflow() -> None:
    """Sums, differences and products of 32-bit integers are computed once.

    The interpreter computes each again in 64 bits, and drops what it finds: only with `debug` would
    it be an error.
    """
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    assert not options.debug
    interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_language_once() -> None:
    """The interpreter's functions stay in Triton's language between kernels."""
    from triton.runtime import interpreter

    language = interpreter.tl

    def patch_attribute(obj: object, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return member(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attribute
    interpreter._patch_lang(
        SimpleNamespace(__globals__={"language": language, "core": language.core})
    )
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda fn: nothing


def _keep_types() -> None:
    """NumPy's types, the types of results, and a look at whether types are the same object."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    numpy_type, numpy_types = interpreter._get_np_dtype, {}
    same_type = core.dtype.__eq__
    result_type, result_types = TritonSemantic.computation_type_impl, {}
    unwrap, plain = core._unwrap_if_constexpr, frozenset({int, bool, float, str, core.dtype})

    def numpy_type_of(of: Any) -> Any:
        element = of.element_ty if isinstance(of, core.block_type) else of
        name = element.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(of)
        return numpy_types[name]

    def is_same_type(self: Any, other: Any) -> bool:
        return self is other or same_type(self, other)

    def result_type_of(
        self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool
    ) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, divides
        if key not in result_types:
            result_types[key] = result_type(self, a, a_is_scalar, b, b_is_scalar, divides)
        return result_types[key]

    def unwrapped(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return value if type(value) in plain else unwrap(value)

    interpreter._get_np_dtype = numpy_type_of
    core.dtype.__eq__ = is_same_type
    TritonSemantic.computation_type_impl = result_type_of
    core._unwrap_if_constexpr = unwrapped


def _keep_shapes() -> None:
    """Shapes of blocks, and of tensors as the language gives them to kernels."""
    from triton.language import core

    block_shapes: dict[tuple[int, ...], tuple[Any, int]] = {}
    tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    start_block, start_tensor = core.block_type.__init__, core.tensor.__init__

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if isinstance(shape, core.tuple) else shape
        key = tuple(core._unwrap_if_constexpr(value) for value in values)
        if key not in block_shapes:
            start_block(self, element_ty, shape)
            block_shapes[key] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = block_shapes[key]
        self.name = f"<{key}, {element_ty.name}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in tensor_shapes:
            start_tensor(self, handle, type)
            tensor_shapes[key] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = tensor_shapes[key]

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
