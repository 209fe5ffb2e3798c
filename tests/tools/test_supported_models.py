"""The families that matter, past every limit of theirs; `python tools/supported_models.py` does all."""

import pytest
from transformers import CONFIG_MAPPING

from tests.tools.loaded_files import TOOLS, load_file

tool = load_file(TOOLS / "supported_models.py")
EXACT = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "olmo3",
         "deepseek_v3", "smollm3", "exaone4"]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("family", EXACT)
def test_families_that_matter_are_exact(family):
    assert tool.verdict(CONFIG_MAPPING[family]()) == "exact"


@pytest.mark.parametrize(
    ("family", "start"),
    [
        ("llama4_text", "exact up to 8192 tokens"),
        ("diffllama", "refused: DiffLlama can't be served"),
        ("falcon", "refused: FalconForCausalLM can't be served"),
        ("mamba", "refused: MambaForCausalLM can't be served"),
    ],
)
def test_others_say_why(family, start):
    assert tool.verdict(CONFIG_MAPPING[family]()).startswith(start)


def test_a_family_is_judged_by_its_published_models():
    """LFM2 has convolutions though its default config has none; Phi-3 with 128k tokens switches its factors."""
    first, *rows = tool.table(["lfm2", "phi3"]).splitlines()
    page = (TOOLS.parent / "docs" / "models.md").read_text(encoding="utf-8").splitlines()
    assert [row.split("|")[3].strip() for row in rows[1:]] == [
        "refused: layers (conv)",
        "exact",
        "exact up to 4096 tokens",
    ]
    assert {first, *rows} <= set(page)


def test_the_page_names_every_family_that_this_transformers_has():
    page = (TOOLS.parent / "docs" / "models.md").read_text(encoding="utf-8")
    missing = [name for name in EXACT if f"| `{name}` |" not in page]
    assert not missing
