import itertools

from penstock.trainer.step.clock import StepClock


def test_parts_of_the_same_name_add_up(monkeypatch):
    """Each look at the clock is a second after the last."""
    monkeypatch.setattr("penstock.trainer.step.clock.time.perf_counter", itertools.count().__next__)
    clock = StepClock("cpu")
    for _ in range(2):
        with clock.device("forward"):
            pass
    with clock.host("prepare"):
        pass
    assert clock.seconds() == {"forward": 2, "prepare": 1}


def test_on_a_gpu_its_own_clock_counts_and_nobody_waits_before_the_end(monkeypatch):
    waited = []

    class Event:
        now = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "the stream of cuda:1"
            Event.now += 500
            self.at = Event.now

        def synchronize(self):
            waited.append(self.at)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"the stream of {device}")
    clock = StepClock("cuda:1")
    for name in ("forward", "backward", "forward"):
        with clock.device(name):
            pass
    assert waited == []
    assert clock.seconds() == {"forward": 1.0, "backward": 0.5}
    assert waited == [1000, 2000, 3000]
