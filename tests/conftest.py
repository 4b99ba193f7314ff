"""One CPU thread, one seed per test, and hypothesis without clocks or luck."""

import gc

import pytest
import torch
from hypothesis import settings

# With more threads a product may be split differently in a larger stack, and bitwise comparisons lose their meaning.
torch.set_num_threads(1)

settings.register_profile("lather", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("lather")

# Without a GPU torch notes where it was asked to seed one, for later. That takes longer than many a test.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


collect_ignore = ["mac.py"]  # for doctests it would be imported, and gives the process another device


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    seed(0)


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    """What files before have imported and made need not be searched for garbage again and again."""
    gc.collect()
    gc.freeze()


LONG = ("tests/test_kernels.py", "tests/distributed/test_equal.py", "tests/conformance/test_twin.py")
LONG += ("tests/distributed/test_checkpoint.py", "tests/clients/test_trainers.py", "tests/test_kernels_executor.py")
LONG += ("tests/conformance/test_properties.py", "tests/contract/test_torch.py", "tests/distributed/test_mixtures.py")
LONG += ("tests/contract/test_checkpoint.py", "tests/report/test_tune.py", "tests/test_docs.py", "tests/distributed/test_ranks.py")
LONG += ("tests/distributed/test_edges.py", "tests/methods/test_soap.py", "tests/test_demo.py", "tests/test_architecture.py")
LONG += ("tests/scripts/test_examples.py", "tests/scripts/test_benchmarks.py", "tests/scripts/test_experiments.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: begun last they would run alone at the end. One worker runs a file."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONG)))
