"""A backward pass in two halves gives bitwise what one pass gives, and weight gradients come with the second half."""

import gc
import threading
import weakref

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from bessemer import ops

COUNTS = torch.tensor([3, 0, 4, 5])


class Toy(nn.Module):
    """A norm, linear layers with and without bias, one of them used twice, experts, and an addend of the shape of a
    linear layer's result."""

    def __init__(self, dtype=torch.float32, recompute=False):
        super().__init__()
        torch.manual_seed(3)
        self.dtype, self.recompute = dtype, recompute
        self.norm, self.addend = nn.Parameter(torch.rand(16)), nn.Parameter(torch.randn(12, 16))
        self.first, self.bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))
        self.twice, self.experts = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(4, 16, 16))

    def block(self, x_TI):
        normed = ops.add_norm(x_TI, None, self.norm, None, 1e-5, "rmsnorm", self.dtype)[1]
        hidden = ops.linear(normed, self.first, self.bias, self.dtype).float() + self.addend
        hidden = ops.linear(hidden.sin(), self.twice, None, self.dtype)
        hidden = ops.linear(hidden.cos(), self.twice, None, self.dtype)
        return x_TI + ops.grouped_linear(hidden, self.experts, COUNTS)

    def forward(self, x_TI):
        made = checkpoint(self.block, x_TI, use_reentrant=False) if self.recompute else self.block(x_TI)
        return made.float().square().sum()

    def grads(self):
        return {name: param.grad for name, param in self.named_parameters()}


WEIGHTS = {"first", "bias", "twice", "experts"}


def batches(count):
    return [torch.randn(12, 16, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(count)]


def same(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_halves_give_bitwise_the_gradients_of_one(dtype, recompute):
    whole, (x,) = Toy(dtype, recompute), batches(1)
    whole(x).backward()
    split, (y,) = Toy(dtype, recompute), batches(1)
    with ops.put_off_weight_gradients() as queue:
        split(y).backward()
        work = queue.take()
    done = {name for name, grad in split.grads().items() if grad is not None}
    assert done == {"norm", "addend"} and len(work) == 5
    same({n: split.grads()[n] for n in done}, {n: whole.grads()[n] for n in done})
    assert torch.equal(x.grad, y.grad)
    work.run()
    same(split.grads(), whole.grads())
    assert all(grad.dtype == torch.float32 for grad in split.grads().values())
    work.run()  # has nothing left to do
    same(split.grads(), whole.grads())


def test_halves_of_several_micro_batches_may_interleave():
    """The gradient of the addend is one that a queued gradient needs, and the next micro-batch is added to it."""
    whole, split = Toy(), Toy()
    for x in batches(3):
        whole(x).backward()
    with ops.put_off_weight_gradients() as queue:
        first, second, third = batches(3)
        split(first).backward()
        one = queue.take()
        split(second).backward()
        two = queue.take()
        one.run()
        split(third).backward()
        three = queue.take()
    two.run()
    three.run()
    found, expected = split.grads(), whole.grads()
    # each use of a weight is added by itself: another order of sums
    torch.testing.assert_close(found.pop("twice"), expected.pop("twice"), rtol=1e-6, atol=1e-4)
    same(found, expected)


def test_a_weight_in_the_type_of_the_product_is_put_off_too():
    """Without a queue torch's own `linear` runs here."""
    x, weight = (torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with ops.put_off_weight_gradients() as queue:
        ops.linear(x, weight, None, torch.bfloat16).sum().backward()
        assert x.grad is not None and weight.grad is None
        queue.take().run()
    expected = x.detach().float().sum(0).expand(8, 8)
    torch.testing.assert_close(weight.grad.float(), expected, rtol=1e-2, atol=1e-2)


def test_a_computed_weight_gets_its_gradient_at_once():
    master, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    with ops.put_off_weight_gradients() as queue:
        ops.linear(x, master * 2, None, torch.float32).sum().backward()
        assert len(queue.take()) == 0
    torch.testing.assert_close(master.grad, 2 * x.detach().sum(0).expand(8, 8))


def test_a_frozen_weight_leaves_no_work():
    x = torch.randn(4, 8, requires_grad=True)
    with ops.put_off_weight_gradients() as queue:
        ops.linear(x, torch.randn(8, 8), None, torch.float32).sum().backward()
        assert len(queue.take()) == 0 and x.grad is not None


def test_operands_go_with_the_second_half():
    weight = torch.randn(8, 8, requires_grad=True)
    x, cotangent = torch.randn(4, 8), torch.randn(4, 8)
    refs = [weakref.ref(t.untyped_storage()) for t in (x, cotangent)]
    with ops.put_off_weight_gradients() as queue:
        ops.linear(x, weight, None, torch.float32).backward(cotangent)
        work = queue.take()
    del x, cotangent
    gc.collect()
    assert all(ref() is not None for ref in refs)
    work.run()
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_what_waits_holds_operands_and_no_graph():
    """What made the input of a projection, here a leaf and its gradient, goes with the first half."""
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    stream = weakref.ref(x.untyped_storage())
    with ops.put_off_weight_gradients() as queue:
        ops.linear(x * 2, weight, None, torch.float32).sum().backward()
        work = queue.take()
    del x
    gc.collect()
    assert stream() is None and len(work) == 1


def test_backward_in_another_thread_is_put_off_too():
    """Autograd has a thread of its own for each GPU, in which recomputed forwards run as well."""
    toy, (x,) = Toy(recompute=True), batches(1)
    with ops.put_off_weight_gradients() as queue:
        loss = toy(x)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert toy.first.grad is None and len(queue.take()) == 5


def test_hooks_of_a_weight_run_with_each_half():
    """So a hook can't tell that a gradient is complete."""
    weight, x, seen = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True), []
    weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
    with ops.put_off_weight_gradients() as queue:
        ops.linear(x, weight, None, torch.float32).sum().backward()
        queue.take().run()
    assert seen[0] is None and torch.equal(seen[1], weight.grad)


def test_contexts_nest_and_end_with_an_error():
    with pytest.raises(ZeroDivisionError), ops.put_off_weight_gradients(), ops.put_off_weight_gradients():
        raise ZeroDivisionError
    toy, (x,) = Toy(), batches(1)
    toy(x).backward()
    assert toy.first.grad is not None


def sharded(rank, world):
    """Gradients of the whole parameters that FSDP2 gathered: after the first half, after the second."""
    toy, mesh = Toy(), init_device_mesh("cpu", (world,))
    fully_shard(toy, mesh=mesh, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy())
    toy.set_requires_gradient_sync(False)
    toy.set_reshard_after_backward(False)
    found = []
    with ops.put_off_weight_gradients() as queue:
        toy(batches(world)[rank]).backward()
        found.append({n for n, g in toy.grads().items() if g is not None})
        queue.take().run()
    found.append({n: g.numpy() for n, g in toy.grads().items()})
    return found


def test_a_parameter_that_fsdp_gathered_gets_its_gradient():
    for rank, (first, grads) in enumerate(run_ranks(2, sharded)):
        whole = Toy()
        whole(batches(2)[rank]).backward()
        assert first == {"norm", "addend"}
        same({n: torch.from_numpy(g) for n, g in grads.items()}, whole.grads())
