"""Draws what one shuffle does to an MLP and to an attention block; run it to write the figures.

Every weight holds the number of its place, and a real shuffle moves it. So a cell is drawn in the
colour of the place that it came from: the row it was in, or the column for a layer that follows.
"""

from __future__ import annotations

import colorsys
from pathlib import Path

import torch
from torch import Tensor, nn

from shuffled_dpsgd.permutation import apply, discover, draw

HERE = Path(__file__).parent
CELL, GAP, TOP, MARGIN = 20, 46, 64, 80
Picture = dict[str, tuple[Tensor, int]]  # a title, the numbers shown, the axis that colours follow
Hues = tuple[float, ...]
UNITS: Hues = (0.0, 0.1, 0.25, 0.45, 0.6, 0.8)
HEADS: Hues = (0.95, 0.05, 0.13, 0.45, 0.58, 0.72)  # warm colours for one head, cold for the other
START = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
    'height="{height}" role="img" aria-labelledby="t">\n<title id="t">{title}</title>\n'
    '<style>text {{ font: 13px "DejaVu Sans", Verdana, sans-serif; fill: #7d8590 }}</style>\n'
)


class Attention(nn.Module):
    """Self-attention with two heads of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads(x, x, x)[0]
        return found


def numbered(model: nn.Module) -> nn.Module:
    """The model, with every weight equal to the number of its place in its tensor."""
    for parameter in model.parameters():
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter)
    return model


def shuffled(model: nn.Module, seed: int) -> None:
    """Move the weights by one draw from every symmetry of the model."""
    apply(draw(discover(model, scope="full"), torch.Generator().manual_seed(seed)), model)


def mlp(model: nn.Sequential) -> Picture:
    first, last = model[0], model[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    bias = first.bias.detach()[:, None]
    return {
        "W₁": (first.weight.detach().clone(), 0),
        "b₁": (bias.clone(), 0),
        "W₂": (last.weight.detach().clone(), 1),
    }


def attention(model: Attention) -> Picture:
    rows = model.heads.in_proj_weight.detach().clone().chunk(3)
    found: Picture = {name: (part, 0) for name, part in zip("QKV", rows, strict=True)}
    return found | {"O": (model.heads.out_proj.weight.detach().clone(), 1)}


def colour(number: int, columns: int, axis: int, hues: Hues) -> str:
    """The hue of the slot that a number belongs to; lightness differs along the slot."""
    row, column = divmod(number, columns)
    slot, along = (row, column) if axis == 0 else (column, row)
    shade = 0.42 + 0.3 * ((along * 5 + slot * 3) % 7) / 6
    red, green, blue = colorsys.hls_to_rgb(hues[slot % len(hues)], shade, 0.5)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def panel(picture: Picture, top: int, hues: Hues) -> tuple[list[str], int]:
    """The tensors side by side, and where the last of them ends."""
    lines, left = [], MARGIN
    for title, (values, axis) in picture.items():
        columns = values.shape[1]
        middle = left + columns * CELL / 2
        lines.append(f'<text x="{middle:g}" y="{top - 10}" text-anchor="middle">{title}</text>')
        for (row, column), value in zip(
            torch.cartesian_prod(*map(torch.arange, values.shape)).tolist(),
            values.flatten().tolist(),
            strict=True,
        ):
            place = f'x="{left + column * CELL}" y="{top + row * CELL}"'
            fill = colour(int(value), columns, axis, hues)
            lines.append(f'<rect {place} width="{CELL - 1}" height="{CELL - 1}" fill="{fill}"/>')
        left += columns * CELL + GAP
    return lines, left - GAP


def figure(title: str, before: Picture, after: Picture, hues: Hues) -> str:
    """Both states, one above the other."""
    rows = max(len(values) for values, _ in before.values())
    lines: list[str] = []
    for number, (word, picture) in enumerate((("before", before), ("after", after))):
        top = 34 + number * (rows * CELL + TOP)
        found, width = panel(picture, top, hues)
        lines += [f'<text x="12" y="{top + rows * CELL / 2:g}">{word}</text>', *found]
    height = top + rows * CELL + 14
    start = START.format(width=width + 14, height=height, title=title)
    return start + "\n".join(lines) + "\n</svg>\n"


def drawn() -> dict[str, str]:
    """Both figures, by file name."""
    network = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    numbered(network)
    states = [mlp(network)]
    shuffled(network, seed=4)
    title = "The rows of the first layer and the columns of the second move together"
    found = {"shuffle-mlp.svg": figure(title, *states, mlp(network), UNITS)}
    block = Attention()
    numbered(block)
    before = attention(block)
    shuffled(block, seed=5)
    title = "Rows of Q and K, and rows of V with columns of O, move inside a head; heads move whole"
    return found | {"shuffle-attention.svg": figure(title, before, attention(block), HEADS)}


if __name__ == "__main__":
    for name, text in drawn().items():
        (HERE / name).write_text(text, encoding="utf-8")
