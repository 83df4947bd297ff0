"""Two optimizers of the paper that torch lacks: Adam-atan2 and Adam with parameter scaling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["AdamAtan2", "ScaledAdam"]

CHUNK = 1 << 16
"""Elements worked on at a time on a CPU: moments, gradient and scratch stay in its cache."""
SMALL = 1 << 12
"""Below this, numpy's arctangent costs as much as torch's, whose last digit is better."""


def _check(lr: float | Tensor, betas: tuple[float, float], weight_decay: float) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"A tensor lr must have one element, got shape {tuple(lr.shape)}.")
    elif not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr must not be negative, got {lr}.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}.")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}.")


class _Moments(Optimizer):
    """Adam's moments, kept in float32 for half-precision parameters."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; unlike the base class, keep float32 moments of half parameters."""
        super().load_state_dict(state_dict)
        order = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(order, params, strict=True):
            saved = state_dict["state"].get(index, {})
            for name in ("exp_avg", "exp_avg_sq"):
                if name in saved and p.dtype in (torch.float16, torch.bfloat16):
                    self.state[p][name] = saved[name].to(p.device, torch.float32, copy=True)

    def _collect(self, group: dict[str, Any]) -> tuple[list[Tensor], ...]:
        params, grads, averages, squares, steps = [], [], [], [], []
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients.")
            if torch.is_complex(p):
                raise RuntimeError(f"{type(self).__name__} does not support complex parameters.")
            state = self.state[p]
            if not state:
                half = p.dtype in (torch.float16, torch.bfloat16)
                kind = torch.float32 if half else p.dtype
                device = p.device if group["capturable"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(p, dtype=kind)
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=kind)
            params.append(p)
            grads.append(p.grad)
            averages.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            steps.append(state["step"])
        return params, grads, averages, squares, steps

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one step.

        Parameters
        ----------
        closure : callable, optional
            Re-evaluates the model and returns the loss.

        Returns
        -------
        float or None
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lists = self._collect(group)
            if not lists[0]:
                continue
            # Tensors of one device and type go through the multi-tensor kernels together.
            buckets: dict[tuple, list[int]] = {}
            for i, p in enumerate(lists[0]):
                step = None if _traced(group) else lists[4][i].item()
                buckets.setdefault((p.device, p.dtype, lists[1][i].dtype, step), []).append(i)
            for indices in buckets.values():
                self._update(group, *([values[i] for i in indices] for values in lists))
        return loss

    def _update(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        raise NotImplementedError


def _traced(group: dict[str, Any]) -> bool:
    """Whether the step count must stay a tensor (CUDA graphs, ``torch.compile``)."""
    return group["capturable"] or torch.compiler.is_compiling()


def _bias_corrections(group: dict[str, Any], steps: list[Tensor]) -> tuple[Any, Any]:
    """Advance the counts; return ``1 - beta ** t`` for both moments, number or tensor."""
    torch._foreach_add_(steps, 1)
    t = steps[0] if _traced(group) else steps[0].item()
    beta1, beta2 = group["betas"]
    return 1 - beta1**t, 1 - beta2**t


def _decay(group: dict[str, Any], params: list[Tensor]) -> None:
    if group["weight_decay"]:
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])


def _moments(
    group: dict[str, Any], grads: list[Tensor], averages: list[Tensor], squares: list[Tensor]
) -> None:
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(averages, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)


class AdamAtan2(_Moments):
    r"""Adam without epsilon: the quotient becomes an arctangent (Appendix C.5 of the paper).

    .. math:: \theta \leftarrow (1 - \eta\lambda)\,\theta
              - \eta\,a\,\mathrm{atan2}\!\left(\hat m,\, b\sqrt{\hat v}\right)

    Multiplying the loss by any constant changes nothing (a power of two: not one bit), as long as
    squares of gradients neither under- nor overflow. There is no division, so nothing to guard.

    Parameters
    ----------
    params : iterable of Tensor or dict
        Parameters or parameter groups, for example from :func:`icml24.width_scaling.parametrize`.
    lr : float or Tensor, default 1e-3
    betas : tuple of 2 floats, default (0.9, 0.95)
        Decay of the first and second moment.
    a, b : float, defaults 4/pi and 1
        Scale of the update and of the argument; these defaults give a step of exactly ``lr`` when
        ``m = sqrt(v)``, where Adam's is.
    weight_decay : float, default 0
        Decoupled, as in AdamW.
    bias_correction : {"inside", "outside"}, default "inside"
        Correct the first moment inside the arctangent, or divide the result by ``1 - beta1 ** t``
        (as some kernels do; the step is then not bounded by ``lr * a * pi / 2`` early on).
    maximize : bool, default False
    capturable : bool, default False
        Keep the step count on the device, for CUDA graphs.
    foreach : bool, optional
        True: multi-tensor kernels for all tensors at once. Default: on a CPU the same kernels work
        on one block of elements after another, which stays in the cache.

    Raises
    ------
    ValueError
        For a negative rate or decay, betas outside [0, 1), or scales that are not positive.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = AdamAtan2([w], lr=0.5)
    >>> (1e-15 * w.sum()).backward()                       # far below Adam's usual epsilon
    >>> optimizer.step()
    >>> w.tolist()
    [-0.5, -0.5]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        a: float = 4 / math.pi,
        b: float = 1.0,
        weight_decay: float = 0.0,
        *,
        bias_correction: Literal["inside", "outside"] = "inside",
        maximize: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
    ) -> None:
        _check(lr, betas, weight_decay)
        if not (a > 0 and b > 0):
            raise ValueError(f"a and b must be positive, got a={a} and b={b}.")
        if bias_correction not in ("inside", "outside"):
            raise ValueError(
                f"bias_correction must be 'inside' or 'outside', got {bias_correction!r}."
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "a": a,
            "b": b,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "maximize": maximize,
            "capturable": capturable,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        params, grads, averages, squares, steps = lists
        first, second = _bias_corrections(group, steps)
        # atan2(m / c1, b sqrt(v / c2)) = atan2(m, s sqrt(v)): one factor instead of two divisions.
        scale = group["b"] / second**0.5
        size = group["lr"] * group["a"]
        if group["bias_correction"] == "inside":
            scale = scale * first
        else:
            size = size / first
        size = size if group["maximize"] else -size
        tensors = list(zip(params, grads, averages, squares, strict=True))
        if group["foreach"] or torch.compiler.is_compiling() or params[0].device.type != "cpu":
            self._together(group, scale, size, tensors)
            return
        large = [_large(parts) for parts in tensors]
        scratch = torch.empty(CHUNK, dtype=averages[0].dtype)
        for parts in itertools.compress(tensors, large):
            for pieces in zip(*(torch.split(x.view(-1), CHUNK) for x in parts), strict=True):
                self._piece(group, scale, size, scratch, *pieces)
        for block in _blocks([p for p, cut in zip(tensors, large, strict=True) if not cut]):
            self._together(group, scale, size, block)

    @staticmethod
    def _together(group: dict[str, Any], scale: Any, size: Any, tensors: list[Parts]) -> None:
        """Update several parameters by multi-tensor kernels."""
        params, grads, averages, squares = (list(x) for x in zip(*tensors, strict=True))
        if grads[0].dtype != averages[0].dtype:
            grads = [g.to(averages[0].dtype) for g in grads]
        _decay(group, params)
        _moments(group, grads, averages, squares)
        angles = torch._foreach_sqrt(squares)
        torch._foreach_mul_(angles, scale)
        angles = _foreach_atan2(averages, angles)
        torch._foreach_mul_(angles, size)
        torch._foreach_add_(params, angles)

    @staticmethod
    def _piece(
        group: dict[str, Any],
        scale: Any,
        size: Any,
        scratch: Tensor,
        p: Tensor,
        g: Tensor,
        m: Tensor,
        v: Tensor,
    ) -> None:
        """Update one piece of a large parameter, the same operations one by one."""
        beta1, beta2 = group["betas"]
        g, angle = g.to(m.dtype), scratch[: m.numel()]
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.sqrt(v, out=angle)
        _foreach_atan2([m], [angle.mul_(scale)])  # in place, since on the CPU
        if group["weight_decay"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        if isinstance(size, Tensor):
            p.add_(angle.mul_(size))
        else:
            p.add_(angle, alpha=size)


Parts = tuple[Tensor, ...]
"""A parameter with its gradient and both moments."""


def _large(parts: Parts) -> bool:
    """Whether a parameter is cut into pieces of CHUNK elements."""
    return parts[0].numel() > CHUNK and all(x.is_contiguous() for x in parts)


def _blocks(tensors: list[Parts]) -> Iterator[list[Parts]]:
    """Gather parameters until a block has about CHUNK elements."""
    block: list[Parts] = []
    size = 0
    for parts in tensors:
        if block and size + parts[0].numel() > CHUNK:
            yield block
            block, size = [], 0
        block.append(parts)
        size += parts[0].numel()
    if block:
        yield block


@cache
def _numpy_has_vector_arctan2() -> bool:
    """Whether this machine's numpy has a kernel for wide registers, three times as fast."""
    if not hasattr(np.lib, "introspect"):
        return False
    kernels = np.lib.introspect.opt_func_info(func_name="^arctan2$").get("arctan2", {})
    return bool(kernels) and all("baseline" not in k.get("current", "") for k in kernels.values())


def _foreach_atan2(y: list[Tensor], x: list[Tensor]) -> list[Tensor]:
    """Return ``atan2(y, x)`` for ``x >= 0``, on the CPU in the memory of ``x``.

    Torch has no multi-tensor kernel for it.
    """
    if x[0].is_cuda:
        # The arctangent of the quotient; the clamp, far below any root of a float, only serves 0/0.
        torch._foreach_clamp_min_(x, torch.finfo(x[0].dtype).tiny)
        angles = torch._foreach_div(y, x)
        torch._foreach_atan_(angles)
        return list(angles)
    vector = not torch.compiler.is_compiling() and _numpy_has_vector_arctan2()
    for a, b in zip(y, x, strict=True):
        if vector and b.numel() >= SMALL:
            out = b.numpy()
            np.arctan2(a.numpy(), out, out=out)
        else:
            torch.atan2(a, b, out=b)
    return x


class ScaledAdam(_Moments):
    r"""Adam whose step is relative to the size of the parameter, as in Adafactor.

    .. math:: \theta \leftarrow (1 - \eta\lambda)\,\theta - \eta\,
              \max(\mathrm{RMS}(\theta), \delta)\, \frac{\hat m}{\sqrt{\hat v} + \varepsilon}

    The paper uses it in place of Adafactor, with which it shares the width exponents
    (``optimizer="scaled_adam"``).

    Parameters
    ----------
    params : iterable of Tensor or dict
    lr : float or Tensor, default 1e-2
        Relative: 0.01 changes a parameter by about one per cent per step.
    betas : tuple of 2 floats, default (0.9, 0.98)
    eps : float, default 1e-8
    scale_floor : float, default 1e-3
        ``delta``: lets parameters that are zero move.
    weight_decay : float, default 0
        Decoupled, as in AdamW.
    maximize : bool, default False
    capturable : bool, default False

    Raises
    ------
    ValueError
        For negative arguments or betas outside [0, 1).

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.full((4,), 2.0))
    >>> optimizer = ScaledAdam([w], lr=0.1, eps=0.0)
    >>> w.sum().backward()
    >>> optimizer.step()
    >>> [round(x, 4) for x in w.tolist()]
    [1.8, 1.8, 1.8, 1.8]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        scale_floor: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        _check(lr, betas, weight_decay)
        if not (eps >= 0 and scale_floor >= 0):
            raise ValueError(
                f"eps and scale_floor must not be negative, got {eps} and {scale_floor}."
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "scale_floor": scale_floor,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "capturable": capturable,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        params, grads, averages, squares, steps = lists
        first, second = _bias_corrections(group, steps)
        if grads[0].dtype != averages[0].dtype:
            grads = [g.to(averages[0].dtype) for g in grads]
        sizes = torch._foreach_norm(params)
        _moments(group, grads, averages, squares)
        updates = torch._foreach_sqrt(squares)
        torch._foreach_div_(updates, second**0.5)
        torch._foreach_add_(updates, group["eps"])
        updates = torch._foreach_div(averages, updates)
        sign = 1.0 if group["maximize"] else -1.0
        factor = sign * group["lr"] / first
        roots = [
            (size / p.numel() ** 0.5).clamp_min(group["scale_floor"]) * factor
            for size, p in zip(sizes, params, strict=True)
        ]
        torch._foreach_mul_(updates, roots)
        _decay(group, params)
        torch._foreach_add_(params, updates)
