"""What is drawn of a layer, against tensors made by hand and a tiny model."""

import pytest
import torch

from experiments.study import anatomy
from tests.models.tiny import write_model
from xsparse.ops.selection.naive import select_blocks


def test_density_and_recall_of_a_mask():
    scores = torch.tensor([[[1.0, 0, 0], [3, 1, 0], [2, 5, 3]]])
    mass = torch.tensor([[[4.0, 0, 0], [1, 3, 0], [1, 2, 1]]])
    layer = anatomy.Layer("x", 12, 0, 4, scores, mass, 1, 2)
    forced = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
    assert torch.equal(layer.mask(0.0), forced)
    assert layer.density(0.0).tolist() == pytest.approx([5 / 6])
    assert layer.recall(0.0).tolist() == pytest.approx([10 / 12])
    assert layer.density(0.9).tolist() == [1.0]
    figure = anatomy.draw(layer, 0, 0.0)
    titles = [ax.get_title(loc="left") for ax in figure.axes[:3]]
    assert titles[1:] == ["mask at 0: density 83%", "true mass: 83% is kept"]
    shown = figure.axes[2].images[0].get_array()
    assert shown is not None
    assert shown[2].tolist() == [0.25, 0.5, 0.25]
    assert figure.axes[0].lines[0].get_xdata() == [1, 1]  # the needle


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, max_position_embeddings=8192)
    return folder


def test_a_layer_of_a_prompt_is_whole(folder):
    layer = anatomy.observe(1, length=1024, block_size=32, model=str(folder))
    blocks = -(-layer.tokens // 32)
    assert layer.tokens > 512  # more than a chunk
    assert layer.scores.shape == layer.mass.shape == (4, blocks, blocks)
    assert not layer.mass.triu(1).any()
    sizes = torch.full((blocks,), 32.0)
    sizes[-1] = layer.tokens - 32 * (blocks - 1)
    assert torch.allclose(layer.mass.sum(-1), sizes.expand(4, -1), atol=1e-3)
    assert torch.equal(layer.mask(0.7), select_blocks(layer.scores, 0.7, q_block_start=0))
    assert layer.needle_block is not None
    assert layer.question_block is not None
    assert layer.needle_block < layer.question_block < blocks


def test_a_layer_that_is_not_there_is_refused(folder):
    with pytest.raises(ValueError, match="layer=2: allowed is 0 to 1"):
        anatomy.observe(2, model=str(folder))


def test_the_thresholds_of_a_file_are_drawn():
    content = {"model": "m", "coverage": 0.9, "rows_per_head": 7, "prompt_hashes": ["a", "b"]}
    figure = anatomy.draw_thresholds({**content, "table": [[0.5, 0.25], [0.0, 1.0]]})
    [ax, _] = figure.axes
    shown = ax.images[0].get_array()
    assert shown is not None
    assert shown.tolist() == [[0.5, 0.25], [0.0, 1.0]]
    assert "n = 7 rows a head, 2 prompts" in ax.get_title(loc="left")
