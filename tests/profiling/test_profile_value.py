"""A profile is a value: it is saved, loaded and compared, and says what it does not know."""

import json

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Profile
from pipepart.document import FORMAT_VERSION

pytestmark = pytest.mark.usefixtures("short_profiles")


def measured(width: int = 8) -> Profile:
    model = nn.Sequential(nn.Linear(4, width), nn.Sequential(nn.ReLU(), nn.Linear(width, 2)))
    x, y = torch.randn(12, 4), torch.randint(2, (12,))
    loss_fn = nn.CrossEntropyLoss()
    return pipepart.profile(model, x, loss_fn=loss_fn, target=y, micro_batches=[3, 1], seconds=0, devices=1)


def test_a_profile_loads_as_the_same_value_with_a_fingerprint_of_its_layers(tmp_path):
    profile = measured()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    data = json.loads((tmp_path / "profile.json").read_text())
    assert data["version"] == FORMAT_VERSION
    assert profile.fingerprint == measured().fingerprint != measured(width=9).fingerprint
    data["costs"][0]["saved"] = []
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(
        ValueError, match=r"profile.json is not a Profile(.|\n)*saved_bytes 192, and .* have 0"
    ):
        Profile.load(tmp_path / "profile.json")


def test_a_profile_has_costs_by_number_of_micro_batches():
    profile = measured()
    assert [costs.micro_batches for costs in profile.costs] == [1, 3]
    assert profile.at(3) is profile.costs[1]
    assert list(profile.graph.edges) == [("0", "1.0"), ("1.0", "1.1")]
    with pytest.raises(ValueError, match=r"measured for \[1, 3\] micro-batches, not for 2"):
        profile.at(2)
