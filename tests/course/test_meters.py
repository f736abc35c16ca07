"""The meters of bytes count each piece of memory once, for as long as it is there."""

import torch

from tfmlib.course.meters import Alive, kept_bytes, kept_tensors, peak_bytes, total_bytes

KB = 250  # numbers of 4 bytes


def test_the_peak_is_what_was_alive_at_the_same_time():
    def function(x):
        for _ in range(3):
            x = torch.cat([x, x])  # 2, 4 and 8 kB; what went before is freed
        return x.view(-1)[:1]

    assert peak_bytes(function, torch.zeros(KB)) == 12_000


def test_tensors_from_before_count_until_they_are_freed():
    first, second = torch.zeros(KB), torch.zeros(KB)
    with Alive([first, second, first[1:]]) as alive:
        assert alive.peak == 2_000
        del first
        torch.zeros(KB)
        assert alive.peak == 2_000
        second = [torch.zeros(KB), second]
        torch.zeros(KB)
    assert alive.peak == 3_000


def test_kept_tensors_are_listed_once_and_those_left_out_never():
    x, weight = torch.ones(KB), torch.ones(KB, requires_grad=True)
    with kept_tensors([weight]) as kept:
        y = (x * weight + x[:1] * weight).exp()  # x, and the result of exp
        y.sum()
    assert sorted(t.untyped_storage().data_ptr() for t in kept) == sorted({x.data_ptr(), y.data_ptr()})
    assert total_bytes(kept) == 2_000
    assert kept_bytes(lambda x: (x * x).exp(), x) == 1_000


def test_a_view_of_an_input_is_not_counted():
    x = torch.zeros(KB)
    assert peak_bytes(lambda x: x[1:].view(-1)[:10] + 1, x) == 40
