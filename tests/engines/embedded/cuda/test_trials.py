from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.engines.embedded.tiny import make_model
from tests.triton_device import DEVICE

from penstock.engines.embedded.cuda import cublas, trials  # isort: skip
from penstock.engines.embedded.cuda.cublas import TILES, even_tiles  # isort: skip
from penstock.engines.embedded.cuda.kept_choices import KeptChoices  # isort: skip
from penstock.engines.embedded.cuda.products import Choice, ChosenLinear, Epilogue, Size, product  # isort: skip
from penstock.engines.embedded.cuda.trials import choose_products, quickest, sizes_of  # isort: skip
from penstock.engines.embedded.joined_projections import join_projections  # isort: skip


def timers(*columns):
    """Each gives its times one after another."""
    return [partial(lambda times, load_s: next(times), iter(times)) for times in columns]


def loaded(*pairs):
    """Each has a time for a moment and one under load, or None where it must not come to that."""
    return [lambda load_s, pair=pair: float(pair[load_s > 0]) for pair in pairs]


def test_only_a_clear_winner_over_the_first_is_taken():
    rounds = trials.ROUNDS
    assert quickest(timers([10.0] * rounds, [8.0] * rounds, [9.0] * rounds)) == 1
    assert quickest(timers([10.0] * rounds, [9.95] * rounds)) == 0
    assert (
        quickest(timers([10.0] * rounds, [30.0, *[7.0] * (rounds - 1)])) == 1
    )  # one slow turn is an accident
    assert quickest(timers([10.0] * rounds)) == 0


def test_under_load_torch_and_the_best_few_are_tried_again():
    assert quickest(loaded((10, 12), (8, 11), (8.2, 9))) == 1
    assert quickest(loaded((10, 12), (8, 11), (8.2, 10.5)), under_load=True) == 2
    assert quickest(loaded((10, 12), (8, 9), (8.5, None)), under_load=True) == 1  # too slow to be tried
    assert quickest(loaded((8.1, 9), (8, 8.95)), under_load=True) == 0  # no clear winner under load
    assert quickest(loaded((8.1, 9), (8, 8.5)), under_load=True) == 1
    many = [(8, 9)] * trials.FINALISTS
    assert quickest(loaded((10, 12), *many, (8.01, None)), under_load=True) == 1
    assert (
        quickest(loaded((8.05, 8), *many), under_load=True) == 0
    )  # the last for a moment, the best under load
    assert quickest(loaded((8.5, 8), (8, 9)), under_load=True) == 0


def test_under_load_one_slow_turn_is_an_accident():
    moments = [10.0] * trials.ROUNDS
    turns = [9.0] * trials.LOADS
    for at in range(trials.LOADS):
        slow = [*turns[:at], 30.0, *turns[at + 1 :]]
        warmed_up = [*moments, 12.0, *[10.0] * trials.LOADS]  # of equals the first warms the GPU up
        assert quickest(timers(warmed_up, [*moments, *slow]), under_load=True) == 1
        lucky = [*[9.95] * at, 5.0, *[9.95] * (trials.LOADS - at - 1)]
        assert quickest(timers(warmed_up, [*moments, *lucky]), under_load=True) == 0  # so is one quick one


def test_under_load_most_have_one_turn():
    """The best few of it go on, and torch's way, however slow."""
    times = [9.0 + number / 100 for number in range(trials.FINALISTS)]
    asked = []

    def timer(number, load_s):
        asked.extend([number] * (load_s > 0))
        return [20.0, *times][number] if load_s else 8.0

    assert quickest([partial(timer, number) for number in range(trials.FINALISTS + 1)], under_load=True) == 1
    counts = [asked.count(number) for number in range(trials.FINALISTS + 1)]
    few = [1] * (trials.FINALISTS - trials.LAST)
    assert counts == [
        1 + trials.LOADS,
        *[trials.LOADS] * trials.LAST,
        *few,
    ]  # of equals torch warms the GPU up


def test_the_product_that_is_most_of_the_work_is_tried_under_load(monkeypatch):
    tried = []

    def choose(size, kept, *, thorough, under_load):
        tried.append((size.rows, size.outer, size.inner, thorough, under_load))

    model = make_model("qwen2").bfloat16()
    join_projections(model)
    monkeypatch.setattr(trials, "_choose", choose)
    monkeypatch.setattr(trials.Trial, "of", lambda sites, size, handle: size)
    monkeypatch.setattr(trials, "keep_choices", lambda *args: KeptChoices(None, ""))
    monkeypatch.setattr(trials, "library", lambda: object())
    monkeypatch.setattr(trials, "Handle", lambda device, lib: SimpleNamespace(version=1))
    monkeypatch.setattr(trials.Choices, "handles", {})
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"), raising=False)
    assert choose_products(model, [64, 128], 256) == set()
    gate_and_up = (2 * model.config.intermediate_size, model.config.hidden_size)
    assert [each for each in tried if each[4]] == [(128, *gate_and_up, True, True)]
    assert all(thorough == (rows == 128) for rows, _, _, thorough, _ in tried)


def test_families_and_linear_layers_are_switched_and_keep_their_numbers(monkeypatch):
    """With a trial that always finds something, as a GPU might."""
    model = make_model("qwen2")
    join_projections(model)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    before = model(ids).logits
    assert trials.by_size(model) == {}  # 32 bits are left to torch
    monkeypatch.setattr(trials, "TYPES", {torch.float32: 0})
    found = trials.by_size(model)
    assert len(found) == 5  # qkv with a bias, output, gate and up, down, and the logits
    for sites in found.values():
        for site in sites:
            site.switch()
    assert isinstance(model.lm_head, ChosenLinear)
    assert model.model.layers[0].mlp.gate_proj.family.multiply is product
    torch.testing.assert_close(model(ids).logits, before)


def test_what_is_worth_a_try(monkeypatch):
    model = make_model("qwen2")
    join_projections(model)
    monkeypatch.setattr(trials, "TYPES", {torch.float32: 0})
    groups = trials.by_size(model)
    tried = {}
    for sites in groups.values():
        is_head = sites[0].weight.shape[0] == model.config.vocab_size
        sizes = list(sizes_of(sites[0], is_head, [8, 64, 512], 2048))
        tried[tuple(sites[0].weight.shape)] = [(size.rows, size.epilogue) for size in sizes]
    config = model.config
    both = [Epilogue.NONE, Epilogue.SUM]
    assert tried[config.vocab_size, config.hidden_size] == [(64, both[0]), (512, both[0])]
    assert tried[config.hidden_size, config.intermediate_size] == [
        (8, Epilogue.SUM),
        *[(rows, kind) for rows in (64, 512, 2048) for kind in both],
    ]
    joined = tried[2 * config.intermediate_size, config.hidden_size]
    assert joined == [(rows, Epilogue.NONE) for rows in (64, 512, 2048)]
    assert any(kind is Epilogue.BIAS for kinds in tried.values() for _, kind in kinds)  # query, key, value


def test_without_a_gpu_nothing_is_tried():
    assert choose_products(nn.Linear(8, 8, dtype=torch.bfloat16), [512], 8192) == set()


def test_a_choice_is_told_by_its_tiles(monkeypatch):
    settings = {
        cublas.CONFIG_TILE: 186,
        cublas.CONFIG_CLUSTER: 3,
        cublas.CONFIG_SPLITS: 1,
        cublas.CONFIG_OPTION: 4,
    }
    monkeypatch.setattr(cublas, "_config", lambda algorithm, attribute: settings[attribute])
    size = Size(torch.device("cpu"), torch.float32, 512, 37888, 3584, Epilogue.SUM)
    assert f"{size}: {Choice(None, None)}" == (
        "512 x 37888 x 3584, sum: tiles 144x256, clusters 2x1, splits 1, option 4"
    )
    settings |= {cublas.CONFIG_TILE: 999, cublas.CONFIG_CLUSTER: 77}
    assert cublas.describe(None) == "tiles 999, clusters 77, splits 1, option 4"


def test_tiles_that_divide_the_work_evenly():
    assert even_tiles(3584, 512, 132) == [(112, 128)]  # 128 tiles for 132 multiprocessors
    assert even_tiles(1536, 512, 132) == []
    assert (144, 256) in even_tiles(37888, 512, 132)  # 528 tiles: four rounds
    assert (256, 128) not in even_tiles(37888, 512, 132)  # 592: a fifth round for the last 64
    assert all(tile in TILES for tile in even_tiles(37888, 8192, 132))


@pytest.mark.skipif(DEVICE == "cpu", reason="cuBLASLt needs a GPU")
@pytest.mark.parametrize("epilogue", Epilogue)
def test_every_algorithm_gives_the_product(epilogue, monkeypatch):
    from penstock.engines.embedded.cuda.cublas import Handle, Product, library

    handle = Handle(torch.device(DEVICE), library())
    made = Product(handle, 192, 768, 512, torch.bfloat16, bias=epilogue is Epilogue.BIAS)
    x = torch.randn(192, 512, device=DEVICE).bfloat16()
    weight = torch.randn(768, 512, device=DEVICE).bfloat16()
    want = functional.linear(x.double(), weight.double())
    extra = {}
    if epilogue is not Epilogue.NONE:
        name, rows = ("bias", ()) if epilogue is Epilogue.BIAS else ("added", (192,))
        extra[name] = torch.randn(*rows, 768, device=DEVICE).bfloat16()
        want += extra[name].double()
    named = made.algorithms()
    assert named
    monkeypatch.setattr(cublas, "EVEN", 0)
    algorithms = [*named, *made.variations(named)]
    assert len(algorithms) > len(named)
    settings = [cublas._settings(each) for each in algorithms]
    assert not {*settings[: len(named)]} & {*settings[len(named) :]}
    for algorithm in algorithms:
        out = torch.full((192, 768), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        made.run(algorithm, x, weight, out, **extra)
        assert float((out.double() - want).norm() / want.norm()) < 5e-3


class FakeProduct:
    """Algorithms by their first number: 2 gives other numbers, 3 does not run, the others differ in time alone."""

    def __init__(self, handle, rows, outer, inner, dtype, *, bias):
        self.tried = []

    def algorithms(self):
        return [algorithm(number) for number in (1, 2, 3, 4)]

    def variations(self, named):
        return [algorithm(5)]

    def is_valid(self, algorithm):
        if algorithm.data[0] > 5:
            raise cublas.CublasError("no such thing")
        return True

    def run(self, algorithm, x, weight, out, *, bias=None, added=None):
        number = algorithm.data[0]
        if number == 3:
            raise cublas.CublasError("not supported")
        self.tried.append(number)
        result = functional.linear(x, weight, bias) + (0 if added is None else added)
        out.copy_(result * (1.5 if number == 2 else 1))


def algorithm(number):
    return cublas.Algorithm.of(number.to_bytes(8, "little"))


TIMES = {1: 11.0, 2: 1.0, 4: 8.0, 5: 5.0}


@pytest.fixture
def timed(monkeypatch):
    """Which algorithms were timed, one number for each time."""
    seen = []

    def timer(way, sites):
        number = way.args[1].data[0] if way.func is trials._by_algorithm else None

        def milliseconds(load_s):
            seen.append(number)
            return TIMES.get(number, 10.0)

        return milliseconds

    monkeypatch.setattr(trials, "Product", FakeProduct)
    monkeypatch.setattr(trials, "_timer", timer)
    return seen


def trial_of(epilogue=Epilogue.NONE):
    bias = torch.randn(6) if epilogue is Epilogue.BIAS else None
    site = trials.Site(torch.randn(6, 4), bias, lambda: None)
    return trials.Trial.of([site], Size(torch.device("cpu"), torch.float32, 5, 6, 4, epilogue), None)


@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize(("thorough", "best"), [(False, 4), (True, 5)])
@pytest.mark.usefixtures("timed")
def test_the_fastest_that_gives_the_same_numbers_is_chosen(epilogue, thorough, best, monkeypatch):
    trial = trial_of(epilogue)
    assert trial.fastest(thorough=thorough, under_load=thorough).data[0] == best
    assert 3 not in trial.product.tried
    monkeypatch.setitem(TIMES, best, 9.99)
    if not thorough:
        assert trial.fastest(thorough=thorough, under_load=False) is None  # not clearly quicker than torch


def test_a_second_start_takes_what_the_first_chose(timed, tmp_path, monkeypatch):
    path, hurry = tmp_path / "kept.json", {"thorough": False, "under_load": False}
    first = KeptChoices(path, "this GPU")
    assert trials._choose(trial_of(), first, **hurry).algorithm.data[0] == 4
    monkeypatch.setitem(TIMES, 4, 20.0)
    assert trials._choose(trial_of(Epilogue.SUM), first, **hurry) is None
    first.save()
    timed.clear()
    second = KeptChoices(path, "this GPU")
    assert trials._choose(trial_of(), second, **hurry).algorithm.data[0] == 4
    assert trials._choose(trial_of(Epilogue.SUM), second, **hurry) is None
    assert timed == []
    assert trials._choose(trial_of(), second, thorough=True, under_load=False).algorithm.data[0] == 5
    assert timed != []  # a full batch is tried more thoroughly, and kept apart


@pytest.mark.parametrize("number", [2, 3, 6])
def test_what_was_kept_and_no_longer_works_is_tried_again(number, timed):
    kept = KeptChoices(None, "")
    trial = trial_of()
    kept[trial.key] = bytes(algorithm(number).data)
    assert trials._choose(trial, kept, thorough=False, under_load=False).algorithm.data[0] == 4
    assert timed != []
    assert kept[trial.key] == bytes(algorithm(4).data)
