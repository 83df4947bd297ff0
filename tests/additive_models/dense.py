"""Dense linear algebra, the slow way: what the fast code is compared with."""

import torch


def dense_precision(structure, stack, x, gamma, prior, scale):
    """The precision of network k as a dense matrix, assembled the slow way."""
    result = []
    for k in range(stack.n_networks):
        jacobian = stack.jacobian(x)[k]
        exact = jacobian.T @ torch.diag(gamma) @ jacobian
        if structure == "diag":
            exact = torch.diag(torch.diag(exact))
        if structure == "kron":
            _, inputs, signals = stack.factors(x)
            blocks = []
            for a, g in zip(inputs, signals, strict=True):
                left = a[k].T @ a[k] / len(x)
                right = g[k].T @ torch.diag(gamma) @ g[k]
                blocks += [torch.kron(left, right)] + [right] * bool(len(stack.biases))
            exact = torch.block_diag(*blocks)
        sizes = torch.tensor(stack.group_sizes)
        result.append(scale * exact + torch.diag(prior[k].repeat_interleave(sizes)))
    return torch.stack(result)
