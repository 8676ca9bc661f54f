import json
import math

import pytest
import torch

from tests.ops.cases import Case
from tests.selectors.views import select
from xsparse.selectors import build, thresholds
from xsparse.selectors.threshold import parse

TABLE = {"model": "m", "stride": 8, "block_size": 128, "table": [[0.5, 0.9, 1.0], [0.0, 0.1, 0.2]]}
FITS = {
    "model": "m",
    "selector": "xattention",
    "stride": 8,
    "block_size": 128,
    "layers": 2,
    "q_heads": 3,
}


def write(tmp_path, content) -> str:
    path = tmp_path / "table.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return f"@{path}"


@pytest.mark.parametrize("value", [0.9, "0.9", 0, 1, "1"])
def test_numbers(value):
    assert parse(value).for_layer(7) == float(value)


@pytest.mark.parametrize("value", [1.5, -1, math.nan, math.inf, "x", "", None, True, [0.5, 0.9]])
def test_refused(value):
    with pytest.raises(ValueError, match=r"^threshold=.*: allowed is a number in \[0, 1\]"):
        parse(value)


def test_table(tmp_path):
    read = thresholds(write(tmp_path, TABLE), **FITS)
    assert read.for_layer(0).tolist() == [0.5, 0.9, 1.0]
    assert read.for_layer(1).tolist() == [0.0, 0.1, 0.2]
    assert read.for_layer(1) is read.for_layer(1)
    assert parse(read) is read


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "other", "made for model=m, not other"),
        ("selector", "oracle_topp", "made for selector=xattention, not oracle_topp"),
        ("stride", 16, "made for stride=8, not 16"),
        ("block_size", 64, "made for block_size=128, not 64"),
        ("layers", 3, "the table is 2 layers x 3 query heads, allowed is 3 x 3"),
        ("q_heads", 1, "the table is 2 layers x 3 query heads, allowed is 2 x 1"),
    ],
)
def test_table_of_something_else_is_refused(tmp_path, key, value, message):
    source = write(tmp_path, {**TABLE, "selector": "xattention"})
    with pytest.raises(ValueError, match=message) as error:
        thresholds(source, **{**FITS, key: value})
    assert source in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_that_names_no_selector_or_a_method_without_threshold(tmp_path):
    thresholds(write(tmp_path, TABLE), **{**FITS, "selector": "strided_k"})
    thresholds(write(tmp_path, {**TABLE, "selector": "xattention"}), **{**FITS, "selector": None})


@pytest.mark.parametrize(
    ("method", "refused"),
    [
        ("xattention", False),
        ("oracle_topp", True),
        ("strided_k", True),
        ("random", False),
        ("full", False),
    ],
)
def test_the_methods_that_refuse_a_table_of_xattention(tmp_path, method, refused):
    from xsparse import fit
    from xsparse.kv.shape import CacheShape
    from xsparse.settings import Settings

    source = write(tmp_path, {**TABLE, "selector": "xattention"})
    shape = CacheShape(2, 3, 1, 8, 128, 4, 512, torch.float32, torch.device("cpu"))
    s = Settings(selector=method, threshold=source)
    if refused:
        with pytest.raises(ValueError, match=f"made for selector=xattention, not {method}$"):
            fit.make_selector(s, shape, "m")
    else:
        assert fit.make_selector(s, shape, "m").name == method


@pytest.mark.parametrize(
    "content",
    [
        [[0.5]],
        0.5,
        "not json",
        {"table": [[0.5]]},
        {**TABLE, "table": []},
        {**TABLE, "table": [0.5]},
        {**TABLE, "table": [[0.5], [0.5, 0.5]]},
        {**TABLE, "table": [[1.5]]},
        {**TABLE, "table": [["0.5"]]},
        {**TABLE, "selector": 3},
        '{"model": "m", "stride": 8, "block_size": 128, "table": [[NaN]]}',
    ],
)
def test_malformed_tables_are_refused(tmp_path, content):
    with pytest.raises(ValueError, match="^threshold=@") as error:
        parse(write(tmp_path, content))
    assert "\n" not in str(error.value)


def test_missing_file_is_refused():
    with pytest.raises(ValueError, match=r"threshold=@/no/such: No such file"):
        parse("@/no/such")


def test_a_numeric_check_passes_any_shape():
    assert thresholds(0.5, **FITS).value == 0.5


def test_a_selector_uses_its_layer_and_heads(tmp_path):
    table = {**TABLE, "table": [[0.0, 0.7, 1.0]]}
    case = Case(1000)
    mask = select(build("xattention", threshold=write(tmp_path, table)), case).mask
    for head, threshold in enumerate(table["table"][0]):
        assert torch.equal(
            mask[head], select(build("xattention", threshold=threshold), case).mask[head]
        )
