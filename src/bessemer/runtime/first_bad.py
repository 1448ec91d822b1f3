"""Which operator made the first bad value of a pass that is run again: watched operator by operator, on any device.

    with FirstBad(model) as watch:
        model(batch).backward()
    call = watch.culprit               # None where no bad value led to an output of a part, or to a gradient
    call.operator, call.module         # "aten.log.default", "blocks.1.mlp"
    call.tensors                       # its inputs, by the names in the operator's schema

A value is bad when it is NaN or infinite. Infinities that were written on purpose (a mask of -inf) and those that a
later operator removes are bad values too, but lead nowhere: what is asked is where a bad result comes from. So each
bad tensor carries the call that it goes back to, as long as it lives.

Kernels that torch doesn't dispatch are not seen; what they make bad arrives from nowhere (`Call.arrives`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Call", "FirstBad", "ParameterView", "bad_elements", "tensors_in"]

_NO_ORIGIN = ("c10d", "_c10d_functional", "fsdp")
"""What they bring is another rank's, or was written by a copy that is seen itself."""
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_")
_WRITES_ON_PURPOSE = ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where",
                      "constant_pad_nd", "scalar_tensor", "lift_fresh")  # fmt: skip
_COPIES = ("_to_copy", "clone", "detach", "alias")
_STACK = 12
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class ParameterView:
    """An input that is a parameter, a view of one, or a copy in another type: how its elements lie in it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # of the input, in elements of the parameter
    offset: int

    def index(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """The element of the parameter that is the input's element `at`."""
        flat = self.offset + sum(i * s for i, s in zip(at, self.stride, strict=True))
        found: list[int] = []
        for size in reversed(self.shape):
            flat, rest = divmod(flat, size)
            found.append(rest)
        return tuple(reversed(found))


@dataclass
class Call:
    """A call that made a bad value. args, kwargs: as given, with tensors in them; tensors: its inputs as they were, by
    name; outputs: what it gave. repeats: whether the same call, made again at once, gave the same bad elements.
    arrives: the bad value was in an input already, and no operator that was seen had put it there."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: dict[str, Tensor]
    outputs: list[Tensor]
    module: str
    backward: bool
    stack: list[str]
    parameters: dict[str, ParameterView] = field(default_factory=dict)
    repeats: bool | None = None
    arrives: bool = False
    on_purpose: bool = False


class FirstBad(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches all that runs between enter and exit; the parts of `module` name where. Costs a few passes of time, and
    holds the inputs of each call that made a bad value."""

    MOST = 64
    """Of such calls; later ones only pass on what came before."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.current = ""
        """The operator that runs, or ran last, and the shapes that it was given: of one that raised."""
        self.culprit: Call | None = None
        """The call that the first bad output of a part of the model, or the first bad gradient, comes from."""
        self._module = module
        self._origins: MutableMapping[Tensor, Call] = WeakTensorKeyDictionary()
        self._forward: list[str] = []
        self._backward = ""
        self._hooks: list[Any] = []
        self._owners: dict[int, tuple[str, Tensor, Any]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @property
    def place(self) -> str:
        """The innermost part of the model that runs; empty where none is known."""
        return self._forward[-1] if self._forward else self._backward

    def origin_of(self, values: Any) -> Call | None:
        """Where the first bad tensor in `values` comes from."""
        for tensor in tensors_in(values):
            call = self._origins.get(tensor)
            if call is not None:
                return call
        return None

    @property
    def first(self) -> Call | None:
        """The first call that made a bad value by itself and not on purpose, whether or not it led anywhere."""
        return next((c for c in self.calls if not (c.on_purpose or c.arrives)), None)

    def __enter__(self) -> Self:
        for name, part in self._module.named_modules():
            self._hooks += [
                part.register_forward_pre_hook(lambda _, args, name=name: self._entered(name)),
                part.register_forward_hook(lambda _, args, out, name=name: self._left(name, args, out)),
            ]
        for name, parameter in self._module.named_parameters():
            if type(parameter) is nn.Parameter and parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._look))  # type: ignore[no-untyped-call]
            held = getattr(parameter, "_local_tensor", parameter).detach()
            self._owners[held.untyped_storage().data_ptr()] = name, held, lambda held=held: held
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _entered(self, name: str) -> None:
        self._forward.append(name)

    def _left(self, name: str, args: Any, out: Any) -> None:
        """Backward comes to this part when its output's gradient is known, and leaves it with its input's."""
        self._forward.pop()
        above = self._forward[-1] if self._forward else ""
        self._look(out)
        for tensor in tensors_in(out):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._at, name))  # type: ignore[no-untyped-call]
                break
        for tensor in tensors_in(args):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._at, above))  # type: ignore[no-untyped-call]
                break

    def _at(self, name: str, grad: Tensor) -> None:
        self._backward = name
        self._look(grad)

    def _look(self, values: Any) -> None:
        if self.culprit is None:
            call = self.origin_of(values)
            self.culprit = None if call is None or call.on_purpose else call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a DTensor: it calls the local operators next, which are seen then
        given = dict(kwargs or {})
        inputs = dict(_named(func, args, given))
        self.current = f"{func}({', '.join(f'{n} {list(t.shape)}' for n, t in inputs.items())})"
        before = _before(func, inputs)
        result = self._run(func, args, given)
        packet = func.overloadpacket.__name__
        outputs = [*tensors_in(result), *(t for n, t in inputs.items() if before[n] is not t)]
        if packet in _COPIES and outputs and inputs:
            self._copied(next(iter(inputs.values())), outputs[0])
        if packet in _UNWRITTEN or func.namespace in _NO_ORIGIN:
            return result
        bad = [o for o in outputs if _any_bad(o)]
        if bad:
            call = self._source(before) or self._made(func, args, given, before, outputs)
            for tensor in bad:
                self._origins[tensor] = call
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _source(self, before: Mapping[str, Tensor]) -> Call | None:
        """What a bad input goes back to, unless it was put there on purpose."""
        known = [self._origins.get(t) for t in before.values()]
        return next((call for call in known if call is not None and not call.on_purpose), None)

    def _made(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Mapping[str, Tensor],
        outputs: list[Tensor],
    ) -> Call:
        """A call with a bad result, none of whose inputs goes back to an earlier one."""
        if len(self.calls) >= self.MOST:
            return self.calls[-1]
        packet = func.overloadpacket.__name__
        intended = any(self._origins.get(t) is not None for t in before.values())
        numbers = any(bool(o.isnan().any()) for o in map(_wide, outputs) if _any_bad(o))
        unknown = any(_any_bad(t) for t in before.values()) and not intended
        call = Call(
            operator=str(func),
            args=args,
            kwargs=kwargs,
            tensors=dict(before),
            outputs=outputs,
            module=self.place,
            backward=not self._forward and torch._C._current_autograd_node() is not None,
            stack=_stack(),
            parameters={n: view for n, t in before.items() if (view := self._view(t)) is not None},
            arrives=unknown,
            on_purpose=not (unknown or numbers) and (packet in _WRITES_ON_PURPOSE or intended),
        )
        if not (call.arrives or call.on_purpose):
            call.repeats = self._again(func, call)
        self.calls.append(call)
        return call

    def _again(self, func: Any, call: Call) -> bool:
        """Whether the same call gives the same bad elements once more."""
        fresh = {n: t.clone() for n, t in call.tensors.items()} if func._schema.is_mutable else call.tensors
        args, kwargs = _with(func, call.args, call.kwargs, fresh)
        result = func(*args, **kwargs)
        again = [*tensors_in(result), *(t for n, t in fresh.items() if func._schema.is_mutable and _written(func, n))]
        return all(torch.equal(bad_elements(a), bad_elements(b)) for a, b in zip(call.outputs, again, strict=False))

    def _copied(self, source: Tensor, made: Tensor) -> None:
        """A copy of a parameter in another type is still called by its name."""
        known = self._owner(source)
        if known is not None and made.numel() == known[1].numel() and made.is_contiguous():
            self._owners.setdefault(made.untyped_storage().data_ptr(), (known[0], known[1], _weak(made)))

    def _owner(self, tensor: Tensor) -> tuple[str, Tensor, Tensor] | None:
        """(name, parameter, what of it lies in this tensor's memory)."""
        if not self._owners or not tensor.is_floating_point() or tensor.is_meta:
            return None
        found = self._owners.get(tensor.untyped_storage().data_ptr())
        base = None if found is None else found[2]()
        return None if found is None or base is None else (found[0], found[1], base)

    def _view(self, tensor: Tensor) -> ParameterView | None:
        known = self._owner(tensor)
        if known is None:
            return None
        name, parameter, base = known
        offset = int(tensor.storage_offset() - base.storage_offset())
        return ParameterView(name, tuple(parameter.shape), tuple(tensor.stride()), offset)


def bad_elements(tensor: Tensor) -> Tensor:
    """bool, of the tensor's shape: which elements are NaN or infinite."""
    wide = _wide(tensor)
    return ~torch.isfinite(wide) if wide.is_floating_point() else torch.zeros_like(wide, dtype=torch.bool)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def _wide(tensor: Tensor) -> Tensor:
    """A float8 tensor as float32, which can be asked about its elements."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _any_bad(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
        return False
    return not bool(torch.isfinite(_wide(tensor)).all())


def _named(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a call is given, by name; of lists with their place: tensors.0, tensors.1."""
    names = [argument.name for argument in func._schema.arguments]
    for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Tensor))


def _with(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with these tensors in the place of its own."""
    names = [argument.name for argument in func._schema.arguments]

    def put(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [tensors.get(f"{name}.{i}", item) for i, item in enumerate(value)]
        return tensors.get(name, value) if isinstance(value, Tensor) else value

    return tuple(put(n, v) for n, v in zip(names, args, strict=False)), {n: put(n, v) for n, v in kwargs.items()}


def _before(func: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs as they are now: copies of those that the call writes to."""
    if not func._schema.is_mutable:
        return dict(inputs)
    return {n: t.clone() if _written(func, n) else t for n, t in inputs.items()}


def _written(func: Any, name: str) -> bool:
    top = name.partition(".")[0]
    return any(a.name == top and a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _weak(tensor: Tensor) -> Any:
    holder: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    holder[tensor] = True
    return lambda: next(iter(holder), None)


def _stack() -> list[str]:
    """Where Python is, innermost first, without torch's own frames and this file."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(_TORCH) and f.filename != __file__]
    return [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-_STACK:])]
