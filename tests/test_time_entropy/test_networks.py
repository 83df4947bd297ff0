import copy

import numpy as np
import pytest
import torch

from icml24.core.data import DataUnavailableError
from icml24.test_time_entropy.data import images, make_source_networks, photographs
from icml24.test_time_entropy.networks import (
    EfficientNetLite0,
    TrainingConfig,
    efficientnet_lite0,
    pack,
    source_network,
    train_source,
)

ON_DEMAND = pytest.mark.skipif(
    "not __import__('os').environ.get('ICML24_NETWORK')",
    reason="needs wheels of 19 MB; set ICML24_NETWORK=1 to run",
)


def test_shipped_networks_are_as_good_as_stated():
    test = images()["test"]
    with torch.no_grad():
        found = [
            float((source_network(s)(test.x).argmax(1) == test.y).float().mean()) for s in (0, 4)
        ]
    assert min(found) > 0.85
    with pytest.raises(ValueError, match="one of 0 to 4"):
        source_network(5)


def test_training_learns_and_repeats():
    train, test = images()["train"], images()["validation"]
    config = TrainingConfig(epochs=3, batch_size=64)
    x, y = train.x[:1500], train.y[:1500]
    state = torch.get_rng_state()
    first, again = train_source(x, y, config, seed=1), train_source(x, y, config, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    )
    with torch.no_grad():
        assert (first(test.x[:500]).argmax(1) == test.y[:500]).float().mean() > 0.4
    assert not first.training


def test_training_input_is_checked():
    x, y = torch.zeros(20, 1, 28, 28), torch.zeros(20, dtype=torch.int64)
    with pytest.raises(ValueError, match="at least one batch"):
        train_source(x, y)
    with pytest.raises(ValueError, match="one label each"):
        train_source(x, y[:3])


def test_packing_keeps_every_array(tmp_path, monkeypatch):
    net = source_network(2)
    path = tmp_path / "w.npz"
    path.write_bytes(pack([net, net]))
    with np.load(path) as archive:
        assert np.allclose(archive["stem.weight"][1], net.stem.weight.detach())
        assert archive["norm.running_var"].shape == (2, 16)


def test_the_script_writes_what_the_loader_reads(tmp_path, monkeypatch):
    from icml24.test_time_entropy import networks

    calls = []
    monkeypatch.setattr(
        networks,
        "train_source",
        lambda x, y, seed: calls.append((len(x), seed)) or source_network(0),
    )
    content = make_source_networks(tmp_path / "new" / "w.npz", seeds=2)
    assert calls == [(8000, 0), (8000, 1)]
    assert (tmp_path / "new" / "w.npz").read_bytes() == content


def test_lite0_architecture():
    net = EfficientNetLite0().eval()
    assert sum(isinstance(m, torch.nn.BatchNorm2d) for m in net.modules()) == 49
    assert sum(p.numel() for p in net.parameters()) == 4_652_008
    with torch.no_grad():
        assert net(torch.rand(2, 3, 65, 64)).shape == (2, 1000)


@ON_DEMAND
def test_pretrained_network_knows_most_photographs():
    try:
        photos, net = photographs(224), efficientnet_lite0()
    except DataUnavailableError as error:
        pytest.skip(str(error))
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        logits = net(photos.x)
    assert int((logits.argmax(1) == photos.y).sum()) >= 16
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
