"""The parts of torch_geometric that the column uses, imported in one place.

Loading it takes seconds, so only the networks do; and it still calls a deprecated part of torch.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch_geometric.data import Data
    from torch_geometric.nn import GATConv, GCNConv, MessagePassing, SAGEConv
    from torch_geometric.utils import softmax

__all__ = ["Data", "GATConv", "GCNConv", "MessagePassing", "SAGEConv", "softmax"]
