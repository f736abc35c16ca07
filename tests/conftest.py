"""In the test suite a check that asks for a piece by name is given the reference."""

from tfmlib import pieces


def pytest_generate_tests(metafunc):
    for name in set(metafunc.fixturenames) & set(pieces.PIECES):
        metafunc.parametrize(name, [pieces.reference(name)], ids=["reference"])
