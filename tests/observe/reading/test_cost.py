from penstock.observe.reading.cost import cost_of


def test_hours_of_all_gpus_and_their_price() -> None:
    cost = cost_of(num_gpus=4, seconds=1800.0, tokens=10_000.0, gpu_hour_price=2.5)
    assert (cost.gpu_hours, cost.tokens_per_gpu_hour, cost.price) == (2.0, 5000.0, 5.0)


def test_a_cpu_has_neither() -> None:
    cost = cost_of(num_gpus=0, seconds=1800.0, tokens=10_000.0, gpu_hour_price=None)
    assert (cost.gpu_hours, cost.tokens_per_gpu_hour, cost.price) == (0.0, None, None)
