import json
from pathlib import Path

import pytest

from penstock.bench.shapes import SHAPES, make_shape, num_matrix_parameters
from penstock.bench.train import make_row, model_flops, run


def test_model_flops_are_six_a_parameter_and_token_and_attention() -> None:
    import torch

    model = make_shape("tiny", "cpu", torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_matrix_parameters(model) == parameters  # the embedding is also the head
    # 2 layers, width 64; causal attention is half of 2 · 2 · width · length a token, three times over.
    assert model_flops(model, 32, 8) == 6 * parameters * 32 + 3 * (2 * 2 * 64 * 8 / 2) * 32 * 2


def test_a_row_predicts_the_next_token_everywhere() -> None:
    row = make_row(100, 12, 4, "cpu")
    assert row.lengths == (4, 4, 4)
    assert row.position_ids.tolist() == [[0, 1, 2, 3] * 3]
    assert row.input_ids[0, 1:].tolist() == row.targets[:-1].tolist()


def test_the_bench_writes_its_headline(tmp_path: Path) -> None:
    report = run(tmp_path / "train.json", shape="tiny", tokens=32, length=16, steps=1)
    written = json.loads((tmp_path / "train.json").read_text())
    assert written["headline"]["tflops"] == report["arms"]["penstock"]["tflops"] > 0
    assert {"tflops", "peak_gb"} == set(written["headline"])


def test_unknown_shapes_are_refused() -> None:
    import torch

    with pytest.raises(ValueError, match=f"one of {', '.join(SHAPES)}, got '9b'"):
        make_shape("9b", "cpu", torch.float32)
