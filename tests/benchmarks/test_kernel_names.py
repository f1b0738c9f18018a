"""Names of kernels as one can read them."""

import pytest

from benchmarks.measure.kernel_names import short_name

MUL = "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >"
COPY = (
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const"
    "::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}"
)
FILL = "(anonymous namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}"


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("aten::mm", "aten::mm"),
        ("nvjet_sm90_tst_96x128_64x7_2x1_v_bz_TNN", "nvjet_sm90_tst_96x128_64x7_2x1_v_bz_TNN"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("triton_poi_fused_mul_3", "triton_poi_fused_mul_3"),
        (
            f"void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<{MUL} >(at::TensorIteratorBase&,"
            f" {MUL} const&)::{{lambda(int)#1}}>(int, at::native::gpu_kernel_impl_nocast<{MUL} >)",
            "elementwise_kernel<MulFunctor, float>",
        ),
        (
            f"void at::native::unrolled_elementwise_kernel<{COPY}, std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1,"
            " unsigned int>, at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1> >(int)",
            "unrolled_elementwise_kernel<direct_copy_kernel_cuda, BFloat16>",
        ),
        (
            f"void at::native::elementwise_kernel<128, 4, at::native::{FILL}::operator()() const"
            "::{lambda(float, bool)#1}>(int)",
            "elementwise_kernel<masked_fill_kernel, float>",
        ),
        (
            f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{COPY}>(at::TensorIteratorBase&,"
            f" {COPY} const&)::{{lambda(int)#1}}>(int)",
            "elementwise_kernel<direct_copy_kernel_cuda, BFloat16>",
        ),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*, int, bool)",
            "softmax_warp_forward<float>",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(cutlass_80_simt_sgemm_256x128_8x4_nt_align1::Params)",
            "Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>",
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute"
            "_split_k_kernel__5x_cublas",
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_split_k_kernel",
        ),
        ("void f::run<a::One, b::Two, c::Three, d::Four, e::Five>(int)", "run<One, Two, Three, Four, …>"),
        ("void plain(float*, int)", "plain"),
        ("void broken<at::native::Fill", "broken"),
    ],
)
def test_short_names(full, short):
    assert short_name(full) == short
