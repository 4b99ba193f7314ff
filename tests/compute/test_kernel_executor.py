"""What changes from step to step, in buffers on the device that stay where they are."""

from __future__ import annotations

import torch

import lather
from lather.compute import slices
from lather.compute.kernel_executor import Buffers, Sources
from lather.kernels.schema import Corrections, Numbers, TensorAddresses, position

CPU = torch.device("cpu")
NUMBERS = Numbers(*[0.0] * len(Numbers._fields))
ON = [True, True]


def where(buffers):
    return TensorAddresses(*(row.tolist() for row in buffers.addresses))


def test_buffers_hold_numbers_and_addresses():
    buffers, x = Buffers(2, 3, CPU), torch.randn(3, 4).unbind()
    params, momenta = torch.randn(3, 4).unbind(), torch.randn(3, 4).unbind()
    buffers.load(NUMBERS._replace(lr=0.1, factor_correction=0.5), Sources(x, torch.float32, params, momenta), ON)
    assert buffers.numbers[position(Numbers, "lr")] == 0.1 and buffers.bc2 == 0.5 and buffers.numbers.sum() == 0.6
    assert where(buffers) == TensorAddresses(*([tensor.data_ptr() for tensor in tensors] for tensors in (x, params, momenta)))
    y = torch.randn(3, 4).unbind()
    numbers = NUMBERS._replace(lr=0.2, decay=torch.tensor(0.3))
    buffers.load(numbers, Sources(y, torch.float32, params, momenta), ON)
    assert where(buffers).gradients == [tensor.data_ptr() for tensor in y]
    assert where(buffers).parameters == [tensor.data_ptr() for tensor in params]
    assert where(buffers).momenta == [tensor.data_ptr() for tensor in momenta]
    assert buffers.numbers[position(Numbers, "decay")] == torch.tensor(0.3).double()
    moved = [p.clone() for p in params]
    buffers.load(NUMBERS, Sources(y, torch.float32, moved), ON)
    assert where(buffers).parameters == [p.data_ptr() for p in moved] and where(buffers).momenta == [0, 0, 0]


def test_buffers_know_who_is_active():
    buffers, x = Buffers(2, 1, CPU), [torch.randn(4)]
    for active in ((True, True), (True, False), (False, True), (True, True)):
        buffers.load(NUMBERS, Sources(x, torch.float32), active)
        assert buffers.active.tolist() == list(active)


def test_corrections_of_some_slots():
    buffers = Buffers(3, 1, CPU)
    buffers.correct(Corrections(filter=torch.tensor([0.1, 0.2, 0.3]), moment=0.5, factor=torch.tensor([1.0, 2.0, 3.0])))
    assert torch.equal(buffers.corrections, torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.5, 0.5], [1.0, 2.0, 3.0]]))
    assert buffers.correction("factor", 0, 2, uniform=False).tolist() == [1.0, 2.0]
    assert buffers.correction("factor", 2, 3, uniform=False).tolist() == [3.0]
    torch.testing.assert_close(buffers.correction("filter", 1, 3, uniform=False), torch.tensor([0.2, 0.3]))
    buffers.bc2.fill_(0.75)
    buffers.numbers[position(Numbers, "filter_correction")] = 0.25
    for name, value in (("factor", 0.75), ("filter", 0.25)):
        one = buffers.correction(name, 0, 2, uniform=True)
        assert (one.item(), one.dtype) == (value, torch.float32)


def test_slices_read_their_part_of_what_is_alive(monkeypatch):
    """In memory that stays where it is, because graphs hold its address."""
    monkeypatch.setattr(slices, "suits", lambda *_: True)
    shapes = ((8, 8), (8, 8), (5,))
    opt = lather.Shampoo([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes], beta3=None, graft="adam")
    (executor,) = opt._session.prepare(opt.param_groups, opt.state).units[0].executors
    alive = executor._buffers.alive
    assert [(x.data_ptr(), len(x)) for x in executor._alive] == [(alive.data_ptr(), 2), (alive[2:].data_ptr(), 1)]
