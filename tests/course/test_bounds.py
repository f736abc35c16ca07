"""The watcher of kernels stops an access out of bounds before it happens, and nothing else."""

import pytest
import torch
from tfmlib_checks.bounds import OutOfBounds, within_bounds

from tfmlib import kernels
from tfmlib.kernels import tl, triton

pytestmark = pytest.mark.skipif(
    kernels.RUNS_ON != "interpreter", reason=f"watches Triton's interpreter; here kernels run on: {kernels.RUNS_ON}"
)


@triton.jit()
def copy_kernel(x_ptr, y_ptr, x_stride, y_stride, n_read, n_write, BLOCK: tl.constexpr):
    """y[i] = x[i]: reads the first n_read elements, and writes the first n_write."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i * x_stride, mask=i < n_read, other=0.0)
    tl.store(y_ptr + i * y_stride, x, mask=i < n_write)


@triton.jit()
def bare_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """y[i] = x[i], without a mask."""
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i))


@triton.jit()
def count_kernel(y_ptr, n, BLOCK: tl.constexpr):
    """y[i] += 1 for the first n."""
    i = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + i, tl.full((BLOCK,), 1.0, tl.float32), mask=i < n)


def copy(x, y, n_read, n_write):
    copy_kernel[(1,)](x, y, x.stride(0), y.stride(0), n_read, n_write, BLOCK=8)


def stopped(call) -> OutOfBounds:
    """What the watcher says of a call that it must stop."""
    with within_bounds(), pytest.raises(Exception, match="beyond") as caught:
        call()
    cause = caught.value.__cause__
    assert isinstance(cause, OutOfBounds)
    return cause


def test_what_is_in_bounds_passes():
    x, y = torch.arange(10.0)[1::2], torch.zeros(3, 7).T[1:6, 1]
    with within_bounds() as traffic:
        copy(x, y, 5, 5)
        copy(x, y, 3, 5)
    assert y.tolist() == [1, 3, 5, 0, 0]
    assert traffic.read == {"x": 8}
    assert traffic.written == {"y": 10}


def test_every_element_of_several_axes_is_in_bounds():
    x = torch.arange(24.0).view(2, 3, 4)[:, 1:].transpose(0, 2)  # shares its memory with elements that it lacks
    for i in range(4):
        with within_bounds():
            copy_kernel[(1,)](x[i, 0], torch.zeros(2), x.stride(2), 1, 2, 2, BLOCK=2)
    assert "`x`" in str(stopped(lambda: bare_kernel[(1,)](x, torch.zeros(16), BLOCK=16)))


def test_a_read_beyond_the_end_is_stopped():
    x, y = torch.arange(5.0), torch.zeros(8)
    found = stopped(lambda: copy(x, y, 8, 8))
    assert (found.access, found.tensor) == ("reads", "x")
    assert "reads beyond `x`: 3 of the 8 addresses" in str(found)
    assert not y.any()


def test_a_write_beyond_the_end_is_stopped_before_it_happens():
    memory = torch.zeros(10)
    found = stopped(lambda: copy(torch.ones(8), memory[:5], 8, 6))
    assert (found.access, found.tensor) == ("writes", "y")
    assert not memory.any()


def test_elements_between_those_of_a_view_are_out_of_bounds():
    memory = torch.arange(10.0)
    assert stopped(lambda: copy_kernel[(1,)](memory[::2], torch.zeros(5), 1, 1, 5, 5, BLOCK=8)).tensor == "x"


def test_an_access_without_a_mask_is_watched():
    with within_bounds():
        bare_kernel[(1,)](torch.ones(8), torch.zeros(8), BLOCK=8)
    found = stopped(lambda: bare_kernel[(1,)](torch.ones(8), torch.zeros(7), BLOCK=8))
    assert (found.access, found.tensor) == ("writes", "y")


def test_an_access_far_away_or_to_nothing_is_stopped():
    far = torch.arange(5.0)
    found = stopped(lambda: copy_kernel[(1,)](far, torch.zeros(8), 10**9, 1, 5, 5, BLOCK=8))
    assert found.tensor == "x"
    assert stopped(lambda: copy(torch.zeros(0), torch.zeros(0), 1, 1)).access == "reads"


def test_an_atomic_update_is_watched():
    y = torch.zeros(5)
    with within_bounds() as traffic:
        count_kernel[(1,)](y, 5, BLOCK=8)
    assert traffic.written == {"y": 5}
    assert stopped(lambda: count_kernel[(1,)](y, 6, BLOCK=8)).tensor == "y"
    assert y.tolist() == [1] * 5


def test_each_launch_has_its_own_tensors():
    x, y = torch.ones(8), torch.zeros(8)
    with within_bounds():
        copy(x, y, 8, 8)
        found = None
        try:
            copy(torch.zeros(3), y, 8, 8)
        except Exception as error:
            found = error.__cause__
    assert isinstance(found, OutOfBounds)


def test_the_interpreter_is_left_as_it_was():
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    before = dict(vars(InterpreterBuilder)), dict(vars(GridExecutor))
    with within_bounds():
        assert dict(vars(InterpreterBuilder)) != before[0]
    stopped(lambda: copy(torch.zeros(3), torch.zeros(8), 8, 8))
    with within_bounds(), within_bounds():
        copy(torch.ones(8), torch.zeros(8), 8, 8)
    assert (dict(vars(InterpreterBuilder)), dict(vars(GridExecutor))) == before
