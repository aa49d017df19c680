"""What several files of tests of the planner share."""

import pytest


@pytest.fixture(scope="module")
def no_suggestions():
    """Refuse requests without a search for changes that would fit, which takes longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipepart.planning.planner.Changes.that_fit", lambda *_: [])
        yield
