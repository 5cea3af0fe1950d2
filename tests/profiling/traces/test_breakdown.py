"""Where the time goes, held against a sweep over every nanosecond and against HolisticTraceAnalysis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.speed.traces import (
    FROZEN,
    MAX_DIFFERENCE_PERCENT,
    TraceSummary,
    max_difference,
    summarize_with_fivefold,
    write_random_traces,
)
from fivefold.profiling.traces import read
from fivefold.profiling.traces.rank_trace import classify_kernel
from fivefold.results.trace_report import Breakdown, TraceReport
from tests.profiling.traces import kineto, sweep
from tests.profiling.traces.recorded import ddp_traces, engine_traces

QUICK = kineto.Shape(ranks=2, steps=2, operations=10, longest=400, host=300, latency=90)
NAMES = ("window", "compute", "communication", "exposed", "memcpy", "memcpy_alone", "idle", "idle_host", "idle_waiting")


def nanoseconds(found: Breakdown) -> sweep.Swept:
    return sweep.Swept(*(round(getattr(found, f"{name}_seconds") * 1e9) for name in NAMES))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 3))
def test_the_breakdown_equals_that_of_a_sweep_over_every_nanosecond(
    seed: int, ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    paths = kineto.write(kineto.draw(seed, QUICK._replace(ranks=ranks)), folder, zipped=seed % 2 == 0)
    report = read(paths).report
    for rank, path in enumerate(paths):
        events = kineto.events(kineto.draw(seed, QUICK._replace(ranks=ranks)), rank)
        results = [nanoseconds(item) for item in report.breakdown if item.rank == rank]
        assert results == [sweep.sweep_gpu(events, window) for window in sweep.windows(events)], path
        kernels = [sweep.ns(event) for event in events if event.get("cat") in sweep.DEVICE]
        whole = (min(start for start, _ in kernels), max(end for _, end in kernels))
        assert nanoseconds(report.total[rank]) == sweep.sweep_gpu(events, whole)


def test_parts_of_the_trace_breakdown_add_up_to_the_step(tmp_path: Path) -> None:
    for item in read(kineto.write(kineto.draw(5), tmp_path)).report.breakdown:
        parts = item.compute_seconds + item.exposed_seconds + item.memcpy_alone_seconds + item.idle_seconds
        assert parts == pytest.approx(item.window_seconds, abs=1e-12)
        assert item.idle_host_seconds + item.idle_waiting_seconds == pytest.approx(item.idle_seconds, abs=1e-12)


@pytest.mark.parametrize("seed", json.loads(FROZEN.read_text(encoding="utf-8")))
def test_breakdown_equals_holistic_trace_analysis(seed: str, tmp_path: Path) -> None:
    """What HTA found on the same files is frozen (``python benchmarks/speed/traces.py --freeze``)."""
    theirs = {
        int(rank): TraceSummary(*row) for rank, row in json.loads(FROZEN.read_text(encoding="utf-8"))[seed].items()
    }
    write_random_traces(int(seed), tmp_path)
    mine = summarize_with_fivefold(tmp_path)
    assert mine.keys() == theirs.keys()
    assert max(max_difference(mine[rank], theirs[rank]) for rank in mine) < MAX_DIFFERENCE_PERCENT


def test_an_unlaunched_kernel_ends_an_unattributed_gap(tmp_path: Path) -> None:
    """Without its launch in the trace a gap is neither the host's nor a wait."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": at, "dur": 10, "args": {"stream": 7}}
        for at in (0, 30)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    (result,) = read([path]).report.breakdown
    assert (result.idle_seconds, result.idle_host_seconds, result.idle_waiting_seconds) == (20e-6, 0.0, 0.0)
    assert result.step == "all"


def event(category: str, name: str, start: int, end: int, *, correlation: int = 0) -> dict[str, Any]:
    """An event in microseconds; kernels and copies on stream 7, all else on a thread of the host."""
    args = {"correlation": correlation} if correlation else {}
    on_device = category.lower() in ("kernel", "gpu_memcpy", "memcpy")
    lane = {"pid": 0, "tid": 7, "args": {**args, "stream": 7}} if on_device else {"pid": 9, "tid": 9, "args": args}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, **lane}


def read_one(folder: Path, *events: dict[str, Any], **metadata: object) -> TraceReport:
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events, **metadata}), encoding="utf-8")
    return read([folder / "trace.json"]).report


def test_idle_time_is_classified_by_what_the_host_does(tmp_path: Path) -> None:
    """The host loads for 30 of 40 us, allocates for 10 of 20, and is for 50 us in a copy that began before the gap."""
    report = read_one(
        tmp_path,
        event("kernel", "gemm", 0, 10, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 0, 0, correlation=1),
        event("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 5, 40),
        event("cuda_runtime", "cudaStreamSynchronize", 12, 20),  # within the loader: counts once
        event("cuda_runtime", "cudaLaunchKernel", 49, 50, correlation=2),
        event("kernel", "gemm", 50, 60, correlation=2),
        event("cuda_runtime", "cudaMalloc", 55, 70),
        event("cuda_runtime", "cudaLaunchKernel", 78, 79, correlation=3),
        event("kernel", "gemm", 80, 90, correlation=3),
        event("cuda_runtime", "cudaMemcpyAsync", 85, 140, correlation=4),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 140, 150, correlation=4),
        profile_memory=1,
    )
    (result,) = report.breakdown
    assert result.idle_seconds == result.idle_host_seconds == pytest.approx(110e-6)
    parts = (result.idle_loading_seconds, result.idle_allocation_seconds, result.idle_blocked_seconds)
    assert parts == pytest.approx((30e-6, 10e-6, 50e-6))
    assert "recorded with profile_memory: the host is slower than without" in report.remarks
    assert {line.category: line.largest for line in report.categories}["GEMM"] == "gemm"


def test_traces_of_pytorch_1_8_have_steps_and_a_loader(tmp_path: Path) -> None:
    """Its annotations are operators, its copies Memcpy, its calls Runtime: as in the samples of kineto's tb_plugin."""
    report = read_one(
        tmp_path,
        event("Operator", "ProfilerStep#5", 0, 100),
        event("Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 60),
        event("Operator", "aten::mm", 61, 64),
        event("Runtime", "cudaLaunchKernel", 62, 63, correlation=1),
        event("Kernel", "volta_sgemm_128x32_nt", 65, 100, correlation=1),
    )
    assert report.steps == ("ProfilerStep#5",)
    assert report.breakdown[0].idle_loading_seconds == pytest.approx(60e-6)


@pytest.mark.processes
@pytest.mark.parametrize("record", [ddp_traces, engine_traces], ids=["torch DDP", "our engine"])
def test_the_breakdown_of_a_cpu_trace_equals_that_of_a_sweep(record: object, tmp_path: Path) -> None:
    """Recorded by torch.profiler here; the sweep's ticks are of 100 ns, one of which an operator may lose or gain."""
    assert callable(record)
    paths = record(tmp_path)
    report = read(paths).report
    assert report.device == "CPU"
    for rank, path in enumerate(paths):
        results = [nanoseconds(item) for item in report.breakdown if item.rank == rank]
        swept = sweep.sweep_cpu(path)
        assert [result.window for result in results] == [item.window for item in swept]
        for mine, theirs in zip(results, swept, strict=True):
            assert mine.communication > 0
            for name in ("compute", "communication", "exposed", "idle"):
                assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=0.002 * mine.window), name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k", "GEMM"),
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopA_NNT", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_nn_align8>(Params)", "GEMM"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x32", "GEMM"),
        ("aten::addmm", "GEMM"),
        ("aten::bmm", "GEMM"),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(Params)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)", "norm"),
        ("aten::native_layer_norm_backward", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", "elementwise"),
        ("triton_poi_fused_add_mul_silu_3", "elementwise"),
        ("aten::silu_backward", "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>()", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "memcpy"),
        ("Memset (Device)", "memcpy"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void deep_ep::internode::dispatch<false, 4, false, 8192>()", "communication"),
        ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int, int)", "communication"),
        ("split_embedding_codegen_forward_kernel<float>(fbgemm_gpu::FixedDivisor)", "other"),
        ("void at::native::index_elementwise_kernel<128, 4>(long)", "elementwise"),
        ("void at_cuda_detail::cub::DeviceRadixSortSingleTileKernel<int>()", "other"),
        ("aten::embedding", "other"),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    assert classify_kernel(name) == kind


def test_kernels_launched_by_the_optimizer_belong_to_it(tmp_path: Path) -> None:
    job = kineto.draw(3)
    report = read(kineto.write(job, tmp_path), top=1000).report
    kernels = [item for rank in job.kernels for item in rank]
    mine = sum(kernel.end - kernel.start for kernel in kernels if kernel.in_optimizer) / 1e9
    known = {line.category: line for line in report.categories}
    windows = len(report.breakdown)
    optimizer = mine + sum(
        (kernel.end - kernel.start) / 1e9
        for kernel in kernels
        if not kernel.in_optimizer and "multi_tensor" in kernel.name
    )
    assert known["optimizer"].seconds * windows == pytest.approx(optimizer, abs=1e-12)
    assert sum(line.calls for line in report.kernels) * windows == pytest.approx(len(kernels))
    total = sum(kernel.end - kernel.start for kernel in kernels) / 1e9
    assert sum(line.seconds for line in report.kernels) * windows == pytest.approx(total)
    by_category = sum(line.seconds for line in report.categories)
    assert by_category == pytest.approx(sum(line.seconds for line in report.kernels))
