"""Devices as a literal table: peaks, memory and links, each row with its dated source."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """What the vendor promises of one device. All rates are dense: structured sparsity is never counted.

    A dtype that the source does not state, or that the chip lacks, is absent from `peak_flops`, so that
    nothing is ever held against a guessed peak.

    Attributes:
        name: short name for the command line.
        torch_names: what `torch.cuda.get_device_name()` returns for it.
        peak_flops: FLOP/s by the short dtype names of `specs.dtype`. "fp32" is IEEE float32 outside the
            tensor cores; 16-bit products accumulate in float32.
        memory_bytes: the printed gigabytes times 10^9. Devices report a few percent more; the difference
            leaves room for the driver's context.
        memory_bytes_per_second: of the device memory.
        links_bytes_per_second: one direction a device, by link, the fastest first; sheets print both
            directions together.
        source: document and date of its figures.
    """

    name: str
    torch_names: tuple[str, ...]
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    links_bytes_per_second: Mapping[str, float]
    source: str

    def peak(self, dtype: str) -> float | None:
        """Peak FLOP/s of matrix products under a dtype of `specs.dtype`, None when not stated.

        Autocast dtypes ("amp-bf16") take the peak of the dtype that the products run in.
        """
        return self.peak_flops.get(dtype.removeprefix("amp-"))


def _peaks(
    half: float, tf32: float | None, fp32: float, fp64: float | None, *, bf16: bool = True
) -> dict[str, float]:
    """Peaks in TFLOP/s as a mapping in FLOP/s."""
    peaks = {"fp16": half, "tf32": tf32, "fp32": fp32, "fp64": fp64, "bf16": half if bf16 else None}
    return {dtype: value * 1e12 for dtype, value in peaks.items() if value is not None}


DEVICES = {
    device.name: device
    for device in (
        DeviceSpec(
            name="b200",
            torch_names=("NVIDIA B200",),
            peak_flops=_peaks(2250, 1125, 75, 37),
            memory_bytes=180 * 10**9,
            memory_bytes_per_second=8.0e12,
            links_bytes_per_second={"nvlink": 900e9, "pcie": 64e9},
            source="NVIDIA HGX B200 specifications (per GPU: board figures over 8, sparse halved), 2025",
        ),
        DeviceSpec(
            name="h200",
            torch_names=("NVIDIA H200",),
            peak_flops=_peaks(989, 494.5, 67, 34),
            memory_bytes=141 * 10**9,
            memory_bytes_per_second=4.8e12,
            links_bytes_per_second={"nvlink": 450e9, "pcie": 64e9},
            source="NVIDIA H200 Tensor Core GPU datasheet (SXM; sparse halved), November 2024",
        ),
        DeviceSpec(
            name="h100",
            torch_names=("NVIDIA H100 80GB HBM3",),
            peak_flops=_peaks(989, 494.5, 67, 34),
            memory_bytes=80 * 10**9,
            memory_bytes_per_second=3.35e12,
            links_bytes_per_second={"nvlink": 450e9, "pcie": 64e9},
            source="NVIDIA H100 Tensor Core GPU datasheet (SXM; sparse halved), 2023",
        ),
        DeviceSpec(
            name="h100-pcie",
            torch_names=("NVIDIA H100 PCIe",),
            peak_flops=_peaks(756, 378, 51, 26),
            memory_bytes=80 * 10**9,
            memory_bytes_per_second=2.0e12,
            links_bytes_per_second={"nvlink": 300e9, "pcie": 64e9},
            source="NVIDIA H100 Tensor Core GPU datasheet (PCIe; sparse halved), 2023",
        ),
        DeviceSpec(
            name="h100-nvl",
            torch_names=("NVIDIA H100 NVL",),
            peak_flops=_peaks(835.5, 417.5, 60, 30),
            memory_bytes=94 * 10**9,
            memory_bytes_per_second=3.9e12,
            links_bytes_per_second={"nvlink": 300e9, "pcie": 64e9},
            source="NVIDIA H100 Tensor Core GPU datasheet (NVL; sparse halved), 2024",
        ),
        DeviceSpec(
            name="a100",
            torch_names=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
            peak_flops=_peaks(312, 156, 19.5, 9.7),
            memory_bytes=80 * 10**9,
            memory_bytes_per_second=2.039e12,
            links_bytes_per_second={"nvlink": 300e9, "pcie": 32e9},
            source="NVIDIA A100 Tensor Core GPU datasheet (SXM, 80 GB), June 2021",
        ),
        DeviceSpec(
            name="a100-40gb",
            torch_names=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
            peak_flops=_peaks(312, 156, 19.5, 9.7),
            memory_bytes=40 * 10**9,
            memory_bytes_per_second=1.555e12,
            links_bytes_per_second={"nvlink": 300e9, "pcie": 32e9},
            source="NVIDIA A100 Tensor Core GPU datasheet (SXM, 40 GB), 2020",
        ),
        DeviceSpec(
            name="a100-pcie",
            torch_names=("NVIDIA A100 80GB PCIe",),
            peak_flops=_peaks(312, 156, 19.5, 9.7),
            memory_bytes=80 * 10**9,
            memory_bytes_per_second=1.935e12,
            links_bytes_per_second={"nvlink": 300e9, "pcie": 32e9},
            source="NVIDIA A100 Tensor Core GPU datasheet (PCIe, 80 GB), June 2021",
        ),
        DeviceSpec(
            name="l40s",
            torch_names=("NVIDIA L40S",),
            peak_flops=_peaks(362, 183, 91.6, None),
            memory_bytes=48 * 10**9,
            memory_bytes_per_second=864e9,
            links_bytes_per_second={"pcie": 32e9},
            source="NVIDIA L40S datasheet, 2023",
        ),
        DeviceSpec(
            name="l4",
            torch_names=("NVIDIA L4",),
            peak_flops=_peaks(121, 60, 30.3, None),
            memory_bytes=24 * 10**9,
            memory_bytes_per_second=300e9,
            links_bytes_per_second={"pcie": 32e9},
            source="NVIDIA L4 Tensor Core GPU datasheet (sparse halved), 2023",
        ),
        DeviceSpec(
            name="mi300x",
            torch_names=("AMD Instinct MI300X",),
            peak_flops=_peaks(1307.4, 653.7, 163.4, 81.7),
            memory_bytes=192 * 10**9,
            memory_bytes_per_second=5.3e12,
            links_bytes_per_second={"infinity-fabric": 448e9, "pcie": 64e9},
            source="AMD Instinct MI300X accelerator data sheet, 2023",
        ),
        DeviceSpec(
            name="rtx-5090",
            torch_names=("NVIDIA GeForce RTX 5090",),
            peak_flops=_peaks(209.5, 104.8, 104.8, None),
            memory_bytes=32 * 10**9,
            memory_bytes_per_second=1.792e12,
            links_bytes_per_second={"pcie": 64e9},
            source="NVIDIA RTX Blackwell GPU architecture whitepaper, appendix (float32 accumulation), 2025",
        ),
        DeviceSpec(
            name="rtx-4090",
            torch_names=("NVIDIA GeForce RTX 4090",),
            peak_flops=_peaks(165.2, 82.6, 82.6, 1.29),
            memory_bytes=24 * 10**9,
            memory_bytes_per_second=1.008e12,
            links_bytes_per_second={"pcie": 32e9},
            source="NVIDIA Ada GPU architecture whitepaper, appendix A (float32 accumulation), 2022",
        ),
        DeviceSpec(
            name="rtx-3090",
            torch_names=("NVIDIA GeForce RTX 3090",),
            peak_flops=_peaks(71, 35.6, 35.6, None),
            memory_bytes=24 * 10**9,
            memory_bytes_per_second=936e9,
            links_bytes_per_second={"pcie": 32e9},
            source="NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A (float32 accumulation), 2021",
        ),
        DeviceSpec(
            name="v100",
            torch_names=("Tesla V100-SXM2-32GB",),
            peak_flops=_peaks(125, None, 15.7, 7.8, bf16=False),
            memory_bytes=32 * 10**9,
            memory_bytes_per_second=900e9,
            links_bytes_per_second={"nvlink": 150e9, "pcie": 16e9},
            source="NVIDIA V100 Tensor Core GPU datasheet (SXM2, 32 GB), January 2020",
        ),
        DeviceSpec(
            name="t4",
            torch_names=("Tesla T4",),
            peak_flops=_peaks(65, None, 8.1, None, bf16=False),
            memory_bytes=16 * 10**9,
            memory_bytes_per_second=300e9,
            links_bytes_per_second={"pcie": 16e9},
            source="NVIDIA T4 Tensor Core GPU product page, 2023",
        ),
    )
}


def get_device(name: str) -> DeviceSpec:
    """Look a device up by its short name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name]


def find_device(torch_device_name: str) -> DeviceSpec | None:
    """The row of a device as torch names it, None when there is none.

    Names must match in full: "NVIDIA H100 80GB HBM3 MIG 1g.10gb" is a seventh of an H100 and no row of this
        table.
    """
    for device in DEVICES.values():
        if torch_device_name.strip() in device.torch_names:
            return device
    return None
