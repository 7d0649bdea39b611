"""Studies prepare their data in a cache of their own."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
