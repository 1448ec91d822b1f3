"""The operator that made the first bad value is found, not those that it spoils, nor infinities written on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bessemer.runtime.bad_element import cause_of, first_bad_element
from bessemer.runtime.dump import Bag, Operator, packed_call
from bessemer.runtime.first_bad import FirstBad


class Chain(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("between", "operator"),
    [
        (lambda y: y * float("inf"), "aten.mul.Tensor"),
        (lambda y: y.clone().mul_(float("nan")), "aten.mul_.Tensor"),
        (lambda y: torch.sqrt(-y.abs() - 1), "aten.sqrt.default"),
        (lambda y: torch.where(y > 100, y, float("nan")), "aten.scalar_tensor.default"),
    ],
)
def test_the_operator_that_made_it(between: Callable[[Tensor], Tensor], operator: str) -> None:
    model = Chain(between)
    with FirstBad(model) as watch:
        model(torch.ones(2, 6)).sum().backward()
    call = watch.culprit
    assert call is not None
    assert (call.operator, call.backward, call.repeats, call.arrives) == (operator, False, True, False)
    assert all(bool(torch.isfinite(t).all()) for t in call.tensors.values())
    assert any("test_first_bad.py" in line for line in call.stack)


def test_a_mask_of_infinities_is_no_fault() -> None:
    def masked(y: Tensor) -> Tensor:
        mask = torch.full((5,), 0.0).masked_fill(torch.arange(5) > 2, float("-inf"))
        return torch.softmax(y + mask, dim=-1)

    model = Chain(masked)
    with FirstBad(model) as watch:
        model(torch.ones(2, 6)).sum().backward()
    assert watch.culprit is None and watch.calls, "the mask was seen, and leads nowhere"


def test_a_row_that_is_masked_whole_is_the_softmaxs_fault() -> None:
    model = Chain(lambda y: torch.softmax(y.masked_fill(torch.ones(5, dtype=torch.bool), float("-inf")), dim=-1))
    with FirstBad(model) as watch:
        model(torch.ones(2, 6))
    assert watch.culprit is not None and watch.culprit.operator == "aten._softmax.default"


def test_a_guarded_division_is_no_fault() -> None:
    model = Chain(lambda y: torch.where(y > 100, 1 / (y * 0), y))
    with FirstBad(model) as watch:
        model(torch.ones(2, 6)).sum()
    assert watch.culprit is None


def test_a_gradient_is_found_in_its_part_of_the_model() -> None:
    model = Chain(torch.sqrt)  # whose gradient at 0 is infinite
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.zero_()
    with FirstBad(model) as watch:
        model(torch.ones(2, 6)).sum().backward()
    call = watch.culprit
    assert call is not None and call.backward and call.operator == "aten.div.Tensor"


def test_what_no_operator_made_arrives() -> None:
    def native(y: Tensor) -> Tensor:
        z = torch.empty_like(y)
        z.detach().numpy()[:] = float("nan")  # as a kernel does that torch doesn't dispatch
        return z * 2

    model = Chain(native)
    with FirstBad(model) as watch:
        model(torch.ones(2, 6))
    assert watch.culprit is not None and watch.culprit.arrives


def test_a_call_that_does_not_repeat_is_known() -> None:
    class Flaky(FirstBad):
        spoilt = False

        def _run(self, func, args, kwargs):  # type: ignore[no-untyped-def]
            result = func(*args, **kwargs)
            if "addmm" in str(func) and not self.spoilt:
                self.spoilt = True
                result[1, 2] = float("nan")
            return result

    model = Chain(torch.relu)
    with Flaky(model) as watch:
        model(torch.ones(2, 6))
    assert watch.culprit is not None
    assert (watch.culprit.operator, watch.culprit.repeats) == ("aten.addmm.default", False)


def dumped(call_of: Callable[[], Tensor]) -> Operator:
    """The first bad call of a function, as it comes back from a dump."""
    with FirstBad(nn.Identity()) as watch:
        call_of()
    bag = Bag(1e6)
    return Operator(packed_call(watch.calls[0], bag), bag.kept)


def test_the_element_and_its_cause_are_named() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(4, 9) * 100
    weight = torch.randn(7, 9)
    weight[3, 5] = 3e38
    operator = dumped(lambda: torch.mm(inputs, weight.t()))
    outputs = operator.run()
    bad = first_bad_element({"out.0": outputs[0]})
    assert bad is not None and bad.index[1] == 3
    cause = cause_of(operator.run, operator.inputs, 0, bad.index)
    assert cause is not None and (cause.name, cause.index) == ("mat2", (5, 3))


@pytest.mark.parametrize(
    ("call_of", "name", "index"),
    [
        (lambda: torch.ones(50) / torch.arange(-20.0, 30.0), "other", (20,)),
        (lambda: torch.log(torch.linspace(1, -1, 33)), "self", (16,)),
        (lambda: torch.softmax(torch.tensor([[1.0, float("nan"), 2.0]]), -1), "self", (0, 1)),
        (lambda: torch.full((9,), 1.0).index_put((torch.tensor([4]),), torch.tensor(1e38)).mul(1e38), "self", (4,)),
    ],
)
def test_causes_of_other_operators(call_of: Callable[[], Tensor], name: str, index: tuple[int, ...]) -> None:
    operator = dumped(call_of)
    bad = first_bad_element({f"out.{i}": t for i, t in enumerate(operator.run())})
    assert bad is not None
    cause = cause_of(operator.run, operator.inputs, 0, bad.index)
    assert cause is not None and (cause.name, cause.index) == (name, index)
