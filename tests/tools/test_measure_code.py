from pathlib import Path

from tools.measure_code import STEPS, joined, sizes

MANY = STEPS * 16


def test_sizes_are_those_of_the_source(tmp_path: Path) -> None:
    package = tmp_path / "penstock"
    for name, text in {
        "__init__.py": "",
        "loop/__init__.py": '"""It is the heart."""\n',
        "loop/gate.py": "class Gate:\n    def admit(self):\n        return sorted([], key=lambda one: one)\n",
        "loop/run.py": "from penstock.loop.gate import Gate\n\ndef run():\n    return Gate()\n",
        "bench/lab.py": "import penstock.loop.run\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = sizes(package, ["bench"])
    assert (found["modules"], found["lines"], found["functions"]) == (4, 8, 2)
    assert (found["classes"], found["lambdas"], found["docstrings"]) == (1, 1, 1)
    assert found["folders"] == {".": [1, 0], "loop": [3, 8]}
    assert found["one_importer_under_70"] == 1
    assert sizes(package, [])["one_importer_under_70"] == 2


def test_hops_and_counts_of_several_processes_are_joined(tmp_path: Path) -> None:
    controller, trainer = tmp_path / "1.txt", tmp_path / "2.txt"
    controller.write_text(
        "argv x\ncalled loop/gate.py:Gate.admit\ncalled loop/run.py:run\nhop loop/gate.py:Gate.admit\n"
        f"hop loop/run.py:run\ncount {STEPS} loop/gate.py:Gate.admit\ncount {MANY} loop/gate.py:Gate.admit\n"
    )
    trainer.write_text(
        "called trainer/policy.py:PolicyTrainer.step\nhop trainer/policy.py:PolicyTrainer.step\n"
        f"count {STEPS} trainer/policy.py:PolicyTrainer.step\n"
    )
    found = joined([controller, trainer])
    assert (found["processes"], found["functions"], found["modules"]) == (2, 3, 3)
    assert found["functions_per_group"] == 2  # a trainer's functions run once a step
    assert found["hops_by_name"] == [
        "loop/gate.py:Gate.admit",
        "trainer/policy.py:PolicyTrainer.step",
    ]  # `run` ran once
