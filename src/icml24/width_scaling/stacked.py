"""Train many copies of a small model at once: one batched forward pass, any torch optimizer.

The parameters of ``M`` models lie in one tensor with a leading axis of length ``M``. A vectorised
forward pass (``torch.func``) sees the whole tensor; the optimizer sees ``M`` ordinary parameters
that are views of it, in ordinary parameter groups. So every optimizer works as it is, and each copy
may have its own rates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

__all__ = ["StackedModels"]

Loss = Callable[[Tensor, Tensor], Tensor]


class StackedModels:
    """``M`` models of one architecture that train side by side on the same batches.

    Parameters
    ----------
    models : sequence of nn.Module
        Equal architectures with their own initial weights. Afterwards their parameters are views
        of the stacked tensors: training the stack trains the models.
    loss : callable
        ``loss(output, target)`` returns a scalar for one model.

    Raises
    ------
    ValueError
        If there is no model, or their parameters differ in shape.

    Examples
    --------
    Three learning rates at once:

    >>> models = [nn.Linear(2, 1) for _ in range(3)]
    >>> stack = StackedModels(models, nn.functional.mse_loss)
    >>> groups = [{"params": m.parameters(), "lr": lr} for m, lr in zip(models, (0.1, 0.2, 0.4))]
    >>> optimizer = torch.optim.SGD(groups)
    >>> stack.step(torch.ones(8, 2), torch.zeros(8, 1), optimizer).shape
    torch.Size([3])
    """

    def __init__(self, models: Sequence[nn.Module], loss: Loss) -> None:
        if not models:
            raise ValueError("Give at least one model.")
        shapes = [{name: p.shape for name, p in model.named_parameters()} for model in models]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError("All models must have parameters of the same names and shapes.")
        self.models = list(models)
        self._params, self._buffers = stack_module_state(self.models)
        self._params = {k: p.detach().requires_grad_() for k, p in self._params.items()}
        self._skeleton = copy.deepcopy(models[0]).to("meta")
        self._owned = [dict(model.named_parameters()) for model in models]
        for i, owned in enumerate(self._owned):
            for name, p in owned.items():
                p.data = self._params[name].data[i]

        def one(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            # Fused attention on a CPU has no rule for an extra axis; the plain one has.
            with sdpa_kernel(SDPBackend.MATH):
                return functional_call(self._skeleton, (params, buffers), (x,))

        def one_loss(
            params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor
        ) -> Tensor:
            return loss(one(params, buffers, x), y)

        self._losses = vmap(one_loss, in_dims=(0, 0, None, None))

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss of each model on one batch, shape (M,), without gradients."""
        with torch.no_grad():
            return self._losses(self._params, self._buffers, x, y)

    def backward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute all gradients; return the losses, shape (M,).

        The gradient of each model's parameter is a view of the stacked one; earlier gradients are
        replaced. ``weights``, shape (M,), multiply the losses before the gradients are taken.
        """
        losses = self._losses(self._params, self._buffers, x, y)
        total = losses.sum() if weights is None else losses @ weights
        grads = torch.autograd.grad(total, list(self._params.values()))
        for name, stacked in zip(self._params, grads, strict=True):
            # Fused kernels of torch ignore strides, so a transposed gradient must be laid out anew.
            for owned, grad in zip(self._owned, stacked.contiguous().unbind(), strict=True):
                owned[name].grad = grad
        return losses.detach()

    def step(
        self, x: Tensor, y: Tensor, optimizer: Optimizer, weights: Tensor | None = None
    ) -> Tensor:
        """One training step of every model on the same batch; returns the losses before it."""
        losses = self.backward(x, y, weights)
        optimizer.step()
        return losses
