from tests.tools.loaded_files import TOOLS, load_file


def test_the_tokenizer_has_the_whole_vocabulary_and_knows_its_texts():
    texts = ["How many apples are there?", "How many pears are left?"] * 5
    tokenizer = load_file(TOOLS / "random_model.py").make_tokenizer(iter(texts), 700)
    assert len(tokenizer) == 700
    ids = tokenizer(texts[0]).input_ids
    assert len(ids) < 12  # learnt from the texts, not spelt out
    assert tokenizer.decode(ids) == texts[0]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert all(
        tokenizer.convert_tokens_to_ids(name) < 3 for name in (tokenizer.eos_token, tokenizer.pad_token)
    )
