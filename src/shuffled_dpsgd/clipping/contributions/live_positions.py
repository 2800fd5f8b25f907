"""Leaves out positions at which no sample has a gradient, before norms and sums are computed.

A classifier that looks at one token gives its last layers a gradient there and nowhere else: at all
other positions it is exactly zero, in every sample. These add nothing to norms or sums, but would
cost as much as any other. Only on a CPU: a GPU would have to be waited for.

Whether a position is left out depends on the batch alone, never on batches before it: sums round
otherwise then, and a run that is resumed must round as one that was not interrupted. Autograd finds
the inputs' gradients before anybody has looked, so these are computed at all positions.

Shapes: B samples, T positions, D inputs, P outputs.
"""

from __future__ import annotations

import math

from torch import Tensor

# Of fewer positions none is left out.
FEWEST = 4


def live_positions(g_BTP: Tensor) -> slice | None:
    """From the first to the last position at which some sample has a gradient, if that saves half.

    One look at the middle tells nearly always that it does not. NaN counts as a gradient.
    """
    T = g_BTP.shape[1]
    if g_BTP.device.type != "cpu" or T < FEWEST or g_BTP.numel() == 0:
        return None
    if bool(g_BTP[:, T // 2].any()):
        return None
    is_live_T = (g_BTP.amax((0, 2)) != 0) | (g_BTP.amin((0, 2)) != 0)
    live = is_live_T.nonzero().flatten().tolist() or [0]
    first, end = live[0], live[-1] + 1
    return slice(first, end) if 2 * (end - first) <= T else None


def without_silence(x_BTD: Tensor, g_BTP: Tensor) -> tuple[Tensor, Tensor]:
    """The same pair without positions that add nothing to g^T x.

    All of them if an input is not finite: its product with a gradient of zero is not zero.
    """
    live = live_positions(g_BTP)
    if live is None or not math.isfinite(x_BTD.sum()):
        return x_BTD, g_BTP
    return x_BTD[:, live], g_BTP[:, live]
