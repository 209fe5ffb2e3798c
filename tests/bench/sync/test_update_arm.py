from penstock.bench.sync.update_arm import Effort, UpdateArm


def test_names_say_what_differs() -> None:
    assert UpdateArm(transport="shared_memory").name == "shared memory, full"
    assert UpdateArm(transport="http", selection="delta").name == "http, delta"
    adapter = UpdateArm(transport="cuda_ipc", selection="adapter", rank=32, batch=256, how="MPS")
    assert adapter.name == "cuda ipc, adapter of rank 32, batch 256, MPS"
    attention = UpdateArm(transport="cuda_ipc", selection="adapter", layers=("q_proj",), busy=True)
    assert attention.name == "cuda ipc, adapter of rank 16 on attention, trainer busy"
    without_kv = UpdateArm(transport="http", interrupt="abort_resume", resume_kv="recompute")
    assert without_kv.name == "http, full, abort_resume without KV"
    assert UpdateArm(transport="http", interrupt="drain").name == "http, full, drain"
    assert UpdateArm(transport="http", drained=True).name == "http, full, blocked until drained"


def test_an_arm_may_have_fewer_updates() -> None:
    effort = Effort(shape="tiny", device="cpu", updates=20, warmup=3)
    assert effort.num_updates(UpdateArm(transport="http")) == 23
    assert effort.num_updates(UpdateArm(transport="http", at_most=10)) == 13
