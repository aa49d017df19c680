"""Two builds of a benchmark model are equal, because each process builds its own copy."""

import pytest
import torch

from benchmarks import models


@pytest.mark.parametrize("name", models.BUILDERS)
def test_two_builds_are_equal_and_leave_the_random_state_alone(name: str):
    before = torch.random.get_rng_state()
    one, other = models.build(name), models.build(name)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    assert torch.equal(one.sample, other.sample)
    assert torch.equal(one.target, other.target)
    assert len(one.sample) == len(one.target)
    assert len(one.sample) % 8 == 0  # a batch splits evenly for the peers that take nothing else


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match="mlp16, gpt"):
        models.build("resnet")
