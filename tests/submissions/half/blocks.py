"""A learner who has done the two MLPs, and no norm and no block."""

import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self, d_model, d_ff, bias=True, activation=F.gelu):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias)
        self.down = nn.Linear(d_ff, d_model, bias)
        self.activation = activation

    def forward(self, x):
        hidden = self.up(x)
        return self.down(self.activation(hidden))


class SwiGLU(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate * gate.sigmoid() * self.up(x))
