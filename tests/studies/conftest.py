"""What tests of studies share: a cache of their own, and a finished comparison."""

import pytest
from small_study import compared, plan


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished comparison of softmax with itself under another name, and with ssmax."""
    home = tmp_path_factory.mktemp("compare")
    return compared(plan(home, "softmax", "again=softmax", "ssmax"), home / "cmp"), home / "cmp"
