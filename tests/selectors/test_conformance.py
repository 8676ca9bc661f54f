import re
from pathlib import Path

import pytest
import yaml

from tests.selectors.conformance import CHECKS
from xsparse.selectors import registry

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", registry.names())
def test_conformance(name, check):
    check(name)


@pytest.mark.parametrize("name", registry.METHODS)
def test_a_method_has_a_configuration_and_a_row_in_the_documentation(name):
    options = yaml.safe_load((ROOT / f"conf/selector/{name}.yaml").read_text())
    assert options.pop("name") == name
    selector = registry.build(name, **options)
    assert {key: getattr(selector, key) for key in options} == options
    table = (ROOT / "docs/selectors.md").read_text()
    assert f"| `{name}` |" in table
    row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
    assert set(re.findall(r"`(\w+)`", row.split("|")[-2])) == set(selector.digests)


def example() -> str:
    text = (ROOT / "docs/selectors.md").read_text()
    return re.search(r"## Add a selector.*?```python\n(.*?)```", text, re.S).group(1)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_documented_example_conforms(check, monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    before = set(registry.names())
    code = example()
    assert len(code.splitlines()) <= 30
    exec(compile(code, "docs/selectors.md", "exec"), {"__name__": "documented_example"})
    (name,) = set(registry.names()) - before
    check(name)
