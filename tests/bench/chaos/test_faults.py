import random
from collections import Counter

from penstock.bench.chaos.faults import FAULTS, choose


def test_a_seed_gives_the_same_faults_and_all_of_them_come() -> None:
    once, again = random.Random(3), random.Random(3)
    first = [choose(once) for _ in range(400)]
    assert first == [choose(again) for _ in range(400)]
    assert set(Counter(first)) == set(FAULTS)
