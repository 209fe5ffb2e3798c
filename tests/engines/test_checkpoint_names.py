import torch

from penstock.engines.checkpoint_names import as_checkpoint


def test_joined_experts_become_one_tensor_each() -> None:
    gate_up = torch.arange(2 * 4 * 3).view(2, 4, 3)
    down = torch.arange(2 * 3 * 2).view(2, 3, 2)
    found = dict(
        as_checkpoint(
            {
                "l.mlp.experts.gate_up_proj": gate_up,
                "l.mlp.experts.down_proj": down,
                "l.mlp.gate.weight": down[0],
                "l.mlp.down_proj.weight": down[1],
            }.items()
        )
    )
    assert list(found) == [
        "l.mlp.experts.0.gate_proj.weight",
        "l.mlp.experts.0.up_proj.weight",
        "l.mlp.experts.1.gate_proj.weight",
        "l.mlp.experts.1.up_proj.weight",
        "l.mlp.experts.0.down_proj.weight",
        "l.mlp.experts.1.down_proj.weight",
        "l.mlp.gate.weight",
        "l.mlp.down_proj.weight",
    ]
    assert torch.equal(found["l.mlp.experts.1.up_proj.weight"], gate_up[1, 2:])
    assert torch.equal(found["l.mlp.experts.1.down_proj.weight"], down[1])
