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
