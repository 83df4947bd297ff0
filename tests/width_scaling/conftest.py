import matplotlib as mpl
import pytest
import torch

mpl.use("agg")


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny matrices are fastest on one thread, and results do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
