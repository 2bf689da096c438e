"""A network that writes into views of its volumes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Gated(nn.Module):
    """Gated 3D blocks that write in place wherever they can."""

    def __init__(self, width: int = 48, depth: int = 4):
        super().__init__()
        self.stem = nn.Conv3d(2, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv3d(width, 2 * width, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.GroupNorm(8, 2 * width) for _ in range(depth))
        self.head = nn.Conv3d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            a, b = norm(conv(x)).chunk(2, dim=1)
            x.add_(a.mul_(b.sigmoid_())).mul_(0.7071)
        return self.head(F.elu_(x)).sub_(0.1)
