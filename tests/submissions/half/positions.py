"""A learner who has done the table of sines and the squeezing of positions, and nothing else."""

import torch


def sinusoidal(T, C, base=10_000.0):
    if C % 2:
        raise ValueError("C must be even")
    angles = torch.arange(T)[:, None] / base ** (torch.arange(0, C, 2) / C)
    table = torch.empty(T, C)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()
    return table


def interpolate_positions(positions, trained_length, length):
    return positions if length <= trained_length else positions * trained_length / length
