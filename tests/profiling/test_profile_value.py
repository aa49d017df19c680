"""A profile is a value: it is saved, loaded and compared, and says what it does not know."""

import json

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Profile
from pipepart.document import FORMAT_VERSION

pytestmark = pytest.mark.usefixtures("short_profiles")


def measured(**options) -> Profile:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    x, y = torch.randn(12, 4), torch.randint(2, (12,))
    return pipepart.profile(
        model,
        x,
        loss_fn=nn.CrossEntropyLoss(),
        target=y,
        micro_batches=[3, 1],
        seconds=0,
        devices=1,
        **options,
    )


def test_a_saved_profile_loads_as_the_same_value(tmp_path):
    profile = measured()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert json.loads((tmp_path / "profile.json").read_text())["version"] == FORMAT_VERSION


def test_costs_by_number_of_micro_batches():
    profile = measured()
    assert [costs.micro_batches for costs in profile.costs] == [1, 3]
    assert profile.at(3) is profile.costs[1]
    assert list(profile.graph.edges) == [("0", "1.0"), ("1.0", "1.1")]
    with pytest.raises(ValueError, match=r"measured for \[1, 3\] micro-batches, not for 2"):
        profile.at(2)


def test_the_fingerprint_is_of_the_layers_and_not_of_the_times():
    first, second = measured(), measured()
    assert first.fingerprint == second.fingerprint
    other = pipepart.profile(nn.Sequential(nn.Linear(4, 9)), torch.randn(12, 4), seconds=0)
    assert other.fingerprint != first.fingerprint


EDITS = {
    "unknown field": (lambda data: data.update(speed=3), "speed"),
    "later version": (lambda data: data.update(version=FORMAT_VERSION + 1), "version"),
    "saved bytes that no tensor accounts for": (
        lambda data: data["costs"][0].update(saved=[]),
        r"costs.0: layers.0 has saved_bytes 192, and the tensors in 'saved' that it keeps have 0",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_that_was_edited_wrongly_is_refused_by_field(edit, tmp_path):
    change, field = EDITS[edit]
    path = tmp_path / "profile.json"
    measured().save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"profile.json is (not )?a Profile(.|\n)*{field}"):
        Profile.load(path)


def test_an_unknown_optimizer_names_the_known_ones():
    with pytest.raises(ValueError, match=r"optimizer 'lion' is not known: .*'adam'"):
        measured(optimizer="lion")


def test_more_micro_batches_than_samples_are_refused_before_anything_runs():
    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the loss was computed")

    with pytest.raises(ValueError, match="micro_batches=100 is more than the mini-batch has samples, 64"):
        pipepart.profile(
            nn.Sequential(nn.Linear(2, 2)), torch.zeros(64, 2), loss_fn=loss_fn, micro_batches=(2, 100)
        )
