"""In the test suite a check that asks for a piece by name is given the reference."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: several processes share the cores, kernels too

from tfmlib import pieces

collect_ignore = ["submissions"]  # what learners hand in: not tests


def pytest_generate_tests(metafunc):
    for name in set(metafunc.fixturenames) & set(pieces.PIECES):
        metafunc.parametrize(name, [pieces.reference(name)], ids=["reference"])


LONGEST = ("test_site.py", "test_grading.py", "test_commands.py", "test_notebooks.py")


def pytest_collection_modifyitems(items):
    """The files that take minutes come first: several processes share the rest, and none waits for one at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
