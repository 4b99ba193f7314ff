"""One CPU thread, one seed per test, and hypothesis without clocks or luck."""

import pytest
import torch
from hypothesis import settings

# With more threads a product may be split differently in a larger stack, and bitwise comparisons lose their meaning.
torch.set_num_threads(1)

settings.register_profile("lather", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("lather")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


LONG = ("test_kernels.py", "test_examples.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: begun last they would run alone at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)
