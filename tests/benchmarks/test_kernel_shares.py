import pytest

from benchmarks.kernel_shares import KernelShares, kind_of, profiled


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<>>>",
            "experts' matmuls",
        ),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "other matmuls"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<>>", "attention"),
        ("_decode_kernel", "attention"),
        ("_record_kernel", "recording"),
        ("void at::native::sbtopk::gatherTopK<float>", "sorting tokens by expert"),
        ("_draw_kernel", "sampling"),
        ("triton_poi_fused_mul_silu_3", "element-wise"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_shares_add_up_and_the_longest_come_first() -> None:
    found = KernelShares()
    found.fill({"_record_kernel": (1.0, 16), "nvjet_a": (6.0, 4), "nvjet_b": (3.0, 4)})
    assert found.shares == pytest.approx({"recording": 0.1, "other matmuls": 0.9})
    assert [name for name, _, _ in found.longest] == ["nvjet_a", "nvjet_b", "_record_kernel"]
    assert found.seconds == pytest.approx(1e-5)


def test_without_a_gpu_there_is_nothing_to_see() -> None:
    with profiled(on_gpu=False) as found:
        pass
    assert found.shares == {}
