"""A model of somebody else: a UNet of images, as diffusion models use, in Flax NNX.

It has residual blocks with group norms, attention in the lower resolutions and skips, and predicts
noise as in DDPM (https://arxiv.org/abs/2006.11239).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_DTYPE = jnp.bfloat16
_HEAD = 64


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a UNet.

    Attributes:
        base: Channels of the highest resolution.
        factors: Channels of each resolution, as a multiple of `base`.
        groups: Groups of a norm.
        channels: Channels of an image.
    """

    base: int = 320
    factors: tuple[int, ...] = (1, 2, 4)
    groups: int = 32
    channels: int = 4


TINY = Sizes(base=32, groups=8)


def _conv(rngs: nnx.Rngs, given: int, out: int, size: int = 3, stride: int = 1) -> nnx.Conv:
    return nnx.Conv(given, out, (size, size), stride, dtype=_DTYPE, rngs=rngs)


class Residual(nnx.Module):
    """Two convolutions with norms, and the embedded time between them."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, given: int, out: int):
        """Makes the parameters for `given` channels in and `out` channels out."""
        norm = {"num_groups": sizes.groups, "dtype": _DTYPE, "rngs": rngs}
        self.norm1 = nnx.GroupNorm(given, **norm)
        self.conv1 = _conv(rngs, given, out)
        self.time = nnx.Linear(4 * sizes.base, out, dtype=_DTYPE, rngs=rngs)
        self.norm2 = nnx.GroupNorm(out, **norm)
        self.conv2 = _conv(rngs, out, out)
        self.skip = _conv(rngs, given, out, 1) if given != out else None

    def __call__(self, x: Any, t: Any) -> Any:
        """Returns the next x, [batch, height, width, out]; t is the embedded time."""
        y = self.conv1(nnx.silu(self.norm1(x))) + self.time(nnx.silu(t))[:, None, None]
        y = self.conv2(nnx.silu(self.norm2(y)))
        return y + (x if self.skip is None else self.skip(x))


class Attention(nnx.Module):
    """Attention between all pixels."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, width: int):
        """Makes the parameters."""
        self.norm = nnx.GroupNorm(width, num_groups=sizes.groups, dtype=_DTYPE, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, dtype=_DTYPE, rngs=rngs)
        self.out = nnx.Linear(width, width, dtype=_DTYPE, rngs=rngs)
        self.head = min(_HEAD, width)

    def __call__(self, x: Any) -> Any:
        """Adds attention to x, [batch, height, width, channels]."""
        b, h, w, c = x.shape
        q, k, v = jnp.split(self.qkv(self.norm(x).reshape(b, h * w, c)), 3, -1)
        q, k, v = (z.reshape(b, h * w, c // self.head, self.head) for z in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v).reshape(b, h * w, c)
        return x + self.out(y).reshape(x.shape)


class Level(nnx.Module):
    """Residual blocks of one resolution, with attention after each in the lower ones."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, widths: list[int], out: int, *, attends: bool):
        """Makes a residual block for each number of channels in `widths`."""
        self.residual = nnx.List([Residual(sizes, rngs, width, out) for width in widths])
        self.attention = nnx.List([Attention(sizes, rngs, out) for _ in widths if attends])

    def __call__(self, i: int, x: Any, t: Any) -> Any:
        """Passes x through residual block `i`, and its attention if there is one."""
        x = self.residual[i](x, t)
        return self.attention[i](x) if len(self.attention) else x


class UNet(nnx.Module):
    """Down through the resolutions, and up again with the values of the way down."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        """Makes the parameters."""
        base, time = sizes.base, 4 * sizes.base
        self.base = base
        self.time1 = nnx.Linear(base, time, dtype=_DTYPE, rngs=rngs)
        self.time2 = nnx.Linear(time, time, dtype=_DTYPE, rngs=rngs)
        self.enter = _conv(rngs, sizes.channels, base)
        widths = [base * factor for factor in sizes.factors]
        down, up, skips, width = [], [], [base], base
        for i, own in enumerate(widths):
            down.append(Level(sizes, rngs, [width], own, attends=i > 0))
            skips += [own] if i == len(widths) - 1 else [own, own]
            width = own
        self.down = nnx.List(down)
        self.shrink = nnx.List([_conv(rngs, own, own, 3, 2) for own in widths[:-1]])
        self.middle = Level(sizes, rngs, [width, width], width, attends=True)
        for i, own in reversed(list(enumerate(widths))):
            given = [width + skips.pop(), own + skips.pop()]
            up.append(Level(sizes, rngs, given, own, attends=i > 0))
            width = own
        self.up = nnx.List(up)
        self.grow = nnx.List([_conv(rngs, own, own) for own in widths[:0:-1]])
        self.norm = nnx.GroupNorm(base, num_groups=sizes.groups, dtype=_DTYPE, rngs=rngs)
        self.leave = _conv(rngs, base, sizes.channels)

    def __call__(self, x: Any, t: Any) -> Any:
        """Returns the noise in images, [batch, height, width, channels], at times, [batch]."""
        half = self.base // 2
        angles = t[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(half) / half)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        t = self.time2(nnx.silu(self.time1(waves)))
        x = self.enter(x.astype(_DTYPE))
        skips = [x]
        for n, level in enumerate(self.down):
            x = level(0, x, t)
            skips.append(x)
            if n < len(self.shrink):
                x = self.shrink[n](x)
                skips.append(x)
        for i in range(2):
            x = self.middle(i, x, t)
        for n, level in enumerate(self.up):
            for i in range(2):
                x = level(i, jnp.concatenate([x, skips.pop()], -1), t)
            if n < len(self.grow):
                b, h, w, c = x.shape
                x = self.grow[n](jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest"))
        return self.leave(nnx.silu(self.norm(x)))


def loss_fn(model: UNet, batch: dict[str, Any]) -> Any:
    """Returns the mean squared error of the predicted noise."""
    found = model(batch["images"], batch["times"]).astype(jnp.float32)
    return jnp.mean((found - batch["noise"]) ** 2)


def random_batch(sizes: Sizes, rows: int, side: int) -> dict[str, np.ndarray]:
    """Returns random images and noise, [rows, side, side, channels], and times."""
    rng, shape = np.random.default_rng(0), (2, rows, side, side, sizes.channels)
    images, noise = rng.standard_normal(shape, dtype=np.float32)
    times = rng.uniform(0, 1000, rows).astype(np.float32)
    return {"images": images, "noise": noise, "times": times}
