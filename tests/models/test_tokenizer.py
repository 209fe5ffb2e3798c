"""Prompts to ids, ids to text, stop tokens, and prompts that do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import TaskError, UserError
from penstock.models.tokenizer import (
    ChatTokenizer,
    PromptCache,
    check_prompts,
    model_context,
    warn_of_unknown_characters,
)
from penstock.records import Message, Task

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def save_tokenizer(
    folder: Path, *, eos: bool = True, bos: bool = False, closes: bool = False, **extra: Any
) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: index for index, token in enumerate(["<eos>", "<bos>", "<end>", *"0123456789+=sua;?"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    before, after = "<bos> " if bos else "", " <eos>" if closes else ""
    if bos or closes:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{after}", special_tokens=[("<bos>", 1), ("<eos>", 0)]
        )
    names = {"eos_token": "<eos>"} if eos else {}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", **names, **extra).save_pretrained(
        folder
    )
    return folder


def write_json(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_text_is_tokenised_as_it_is(tiny_model: Path) -> None:
    tokenizer = ChatTokenizer(str(tiny_model))
    assert tokenizer.encode_prompt("12+3=") == [2, 3, 11, 4, 12]
    assert tokenizer.decode([2, 3, 11, 4, 12, 0]) == "12+3="
    assert tokenizer.decode([2, 3, 11, 4, 12, 0], skip_special_tokens=False) == "12+3=<eos>"
    assert tokenizer.stop_token_ids == (0,)


def said(folder: Path, pad_token: str | None = None) -> list[str]:
    lines: list[str] = []
    ChatTokenizer(str(folder), pad_token=pad_token).check_pad_token(lines.append)
    return lines


def test_a_tokenizer_without_a_pad_token_is_a_line_and_no_error(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path)
    assert said(folder) == [
        f"the tokenizer of '{folder}' has no pad token: saved with its end of text, '<eos>', as one; "
        "model.pad_token names another"
    ]
    assert said(folder, "<end>") == []


def test_the_end_of_text_is_what_the_models_config_says(tmp_path: Path) -> None:
    """SmolLM2's tokenizer and config disagree; Llama-3's config has several ends, the end of text first."""
    folder = save_tokenizer(tmp_path)
    write_json(folder, "config.json", eos_token_id=[2, 0])
    assert "end of text, '<end>', as one" in said(folder)[0]


def test_without_an_end_of_text_it_is_saved_without_a_pad_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save_tokenizer(tmp_path / "own", eos=False)
    assert "has no pad token: saved without one; model.pad_token names another" in said(folder)[0]
    ChatTokenizer(str(folder)).save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token is None


def test_a_pad_token_that_is_no_token_is_refused(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, pad_token="<end>")
    with pytest.raises(UserError) as refused:
        said(folder, "<ends>")
    assert str(refused.value) == (
        f"model.pad_token '<ends>' is not a token of '{folder}'; its nearest special token is '<end>'"
    )


@pytest.mark.parametrize(
    ("own", "wanted", "saved"),
    [(None, "<eos>", 0), (None, None, 0), ("<end>", None, 2), ("<end>", "<bos>", 1)],
)
def test_the_pad_token_is_saved(tmp_path: Path, own: str | None, wanted: str | None, saved: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = ChatTokenizer(str(save_tokenizer(tmp_path / "own", pad_token=own)), pad_token=wanted)
    tokenizer.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token_id == saved


def test_a_bos_token_that_the_tokenizer_adds_is_kept(tmp_path: Path) -> None:
    assert ChatTokenizer(str(save_tokenizer(tmp_path, bos=True))).encode_prompt("1") == [1, 4]


def test_an_eos_token_that_the_tokenizer_appends_is_taken_off(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(str(save_tokenizer(tmp_path, bos=True, closes=True)))
    assert tokenizer.encode_prompt("1") == [1, 4]


def test_chat_messages_go_through_the_template(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(str(save_tokenizer(tmp_path, chat_template=TEMPLATE, bos=True)))
    prompt = (Message(role="system", content="1"), Message(role="user", content="2"))
    ids = tokenizer.encode_prompt(prompt)
    assert tokenizer.decode(ids) == "s1;u2;a"
    assert len(ids) == 7, "the template decides about special tokens: no second bos"


def test_the_template_gets_its_arguments(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if enable_thinking is false %};{% endif %}"
    folder = save_tokenizer(tmp_path, chat_template=template)
    asked = (Message(role="user", content="2"),)
    for arguments, text in [({}, "u2;a"), ({"enable_thinking": False}, "u2;a;")]:
        tokenizer = ChatTokenizer(str(folder), template_args=arguments)
        assert tokenizer.decode(tokenizer.encode_prompt(asked)) == text


def test_text_is_appended_without_special_tokens(tmp_path: Path) -> None:
    assert ChatTokenizer(str(save_tokenizer(tmp_path, bos=True, closes=True))).encode("12") == [4, 5]


CHAT = (
    "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.mark.parametrize("after", ["<eos>", "7", None])
def test_a_reply_continues_an_answer_as_the_template_would(tmp_path: Path, after: str | None) -> None:
    """Token for token what the template makes of the whole conversation, whether the answer closed itself or not."""
    tokenizer = ChatTokenizer(str(save_tokenizer(tmp_path, chat_template=CHAT)))
    question, reply = Message(role="user", content="1"), Message(role="user", content="2")
    answer = "7<eos>" if after == "<eos>" else "" if after is None else "7"
    last = None if after is None else tokenizer.encode(after)[0]
    continued = [
        *tokenizer.encode_prompt((question,)),
        *tokenizer.encode(answer),
        *tokenizer.encode_reply((reply,), after=last),
    ]
    said = Message(role="assistant", content=answer.removesuffix("<eos>"))
    assert continued == tokenizer.encode_prompt((question, said, reply))


def test_a_template_that_hides_earlier_answers_is_refused(tmp_path: Path) -> None:
    template = "{{ messages[-1]['content'] }}"
    tokenizer = ChatTokenizer(str(save_tokenizer(tmp_path, chat_template=template)))
    with pytest.raises(TaskError, match="drops or rewrites earlier answers, so messages can't be appended"):
        tokenizer.encode_reply((Message(role="user", content="1"),), after=0)


def test_chat_messages_need_a_template(tiny_model: Path) -> None:
    with pytest.raises(
        TaskError, match="prompts are chat messages but the model's tokenizer has no chat template"
    ):
        ChatTokenizer(str(tiny_model)).encode_prompt((Message(role="user", content="1"),))


def test_a_template_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = ChatTokenizer(str(save_tokenizer(tmp_path, chat_template=template)))
    with pytest.raises(TaskError, match="refuses the prompt: roles must alternate"):
        tokenizer.encode_prompt((Message(role="user", content="1"),))


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [2, 5]}, {"eos_token_id": 7}, (0, 2, 5)),
        ({"eos_token_id": 2}, None, (0, 2)),
        ({}, {"eos_token_id": 3}, (0, 3)),
        (None, {"eos_token_id": [0, 3]}, (0, 3)),
        (None, None, (0,)),
    ],
)
def test_stop_tokens_of_tokenizer_and_model(
    tmp_path: Path,
    generation_config: dict[str, Any] | None,
    config: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    save_tokenizer(tmp_path)
    if generation_config is not None:
        write_json(tmp_path, "generation_config.json", **generation_config)
    if config is not None:
        write_json(tmp_path, "config.json", model_type="llama", **config)
    assert ChatTokenizer(str(tmp_path)).stop_token_ids == expected


def test_a_tokenizer_without_eos_or_pad_is_fine(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(str(save_tokenizer(tmp_path, eos=False)))
    assert tokenizer.stop_token_ids == ()
    assert tokenizer.encode_prompt("7") == [10]


def test_it_can_be_saved_beside_a_model(tmp_path: Path, tiny_model: Path) -> None:
    ChatTokenizer(str(tiny_model)).save(tmp_path / "copy")
    assert ChatTokenizer(str(tmp_path / "copy")).encode_prompt("7") == [8]


def test_a_broken_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError) as raised:
        ChatTokenizer(str(tmp_path))
    assert str(raised.value).startswith(f"the tokenizer of {str(tmp_path)!r} could not be loaded: ")
    assert "\n" not in str(raised.value)


def test_the_context_comes_from_the_config(tiny_model: Path, tmp_path: Path) -> None:
    assert model_context(str(tiny_model)) == 64
    with pytest.raises(UserError, match=r"model '.*none' could not be loaded .no such folder here"):
        model_context(str(tmp_path / "none"))


def test_prompts_that_fit_report_the_longest(tiny_model: Path) -> None:
    tasks = [Task(id="a", prompt="1"), Task(id="b", prompt="123")]
    assert check_prompts(tasks, ChatTokenizer(str(tiny_model)), max_context=8, max_new_tokens=5) == 3


def test_a_prompt_too_long_is_named_with_its_length(tiny_model: Path) -> None:
    tasks = [Task(id="a", prompt="1"), Task(id="b", prompt="1234")]
    with pytest.raises(TaskError) as raised:
        check_prompts(tasks, ChatTokenizer(str(tiny_model)), max_context=8, max_new_tokens=5)
    assert str(raised.value) == (
        "the prompt of task b has 4 tokens; with rollout.max_new_tokens=5 it does not fit the context of "
        "8 tokens: shorten one of them"
    )


def test_an_empty_prompt_is_refused(tiny_model: Path) -> None:
    with pytest.raises(TaskError, match="task e has an empty prompt"):
        check_prompts(
            [Task(id="e", prompt="")], ChatTokenizer(str(tiny_model)), max_context=8, max_new_tokens=5
        )


@pytest.mark.parametrize("content", ["{broken", "[1, 2]", "\udcff"])
def test_a_broken_generation_config_is_named(tmp_path: Path, content: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=r"generation_config\.json is not a JSON object"):
        ChatTokenizer(str(tmp_path))


def test_a_prompt_is_encoded_once_and_the_oldest_are_forgotten() -> None:
    asked = []

    def encode(prompt: str) -> list[int]:
        asked.append(prompt)
        return [ord(letter) for letter in prompt]

    kept = PromptCache(encode, max_tokens=5)
    first = kept.token_ids("ab")
    first.append(0)  # the caller's own
    assert kept.token_ids("ab") == [97, 98]
    assert kept.token_ids("cd") == [99, 100]
    assert asked == ["ab", "cd"]
    kept.token_ids("ef")  # six tokens: "ab" goes
    kept.token_ids("cd")
    assert asked == ["ab", "cd", "ef"]
    kept.token_ids("ab")
    assert asked == ["ab", "cd", "ef", "ab"]


def test_one_that_is_too_long_is_kept_until_the_next() -> None:
    asked = []
    kept = PromptCache(lambda prompt: asked.append(prompt) or [0] * prompt, max_tokens=5)
    assert kept.token_ids(9) == kept.token_ids(9) == [0] * 9
    kept.token_ids(1)
    kept.token_ids(9)
    assert asked == [9, 1, 9]


@pytest.mark.parametrize("family", ["qwen2", "llama", None])
def test_a_tokenizer_without_a_vocabulary_is_named_as_such(family: str | None, tmp_path: Path) -> None:
    """Transformers loads one for some families, and lists its ways to make one for others."""
    from transformers import CONFIG_MAPPING

    if family is not None:
        CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    with pytest.raises(UserError) as refusal:
        ChatTokenizer(str(tmp_path))
    assert str(refusal.value) == (
        f"the tokenizer of '{tmp_path}' has no vocabulary: it must have tokens beside its special ones; copy the "
        "model's tokenizer there (tokenizer.json, tokenizer_config.json)"
    )


def test_characters_without_a_token_are_named(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(str(save_tokenizer(tmp_path)))
    assert tokenizer.unknown_characters("12+x3=y \u0301") == {"x", "y"}
    assert tokenizer.unknown_characters((Message(role="user", content="1z"),)) == {"z"}
    said: list[str] = []
    warn_of_unknown_characters(["1+2=", "12+x", "x-1"], tokenizer, said.append)
    warn_of_unknown_characters(["1+2="], tokenizer, said.append)
    warn_of_unknown_characters(["BCDEFGHIJKLMNO"], tokenizer, said.append)
    assert said == [
        f"the tokenizer of '{tmp_path}' has no token for '-', 'x' (in 2 of 3 prompts): the model does not see them",
        f"the tokenizer of '{tmp_path}' has no token for {', '.join(map(repr, 'BCDEFGHIJKLM'))} and 2 more (in 1 of 1 "
        "prompts): the model does not see them",
    ]


def test_a_tokenizer_of_bytes_knows_every_character(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    assert ChatTokenizer(str(tmp_path)).unknown_characters("aé漢😀\U000323af") == set()
