"""Ranks of their own for each file: the groups of a mesh live as long as their process, and each polls."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import ranks


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_the_file() -> Iterator[None]:
    yield
    if ranks.cache_info().currsize:  # not to start them only to end them
        ranks(4).kill()
