"""One vLLM server as a child process: its command line, its whole environment, its start and its end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.config import RESERVED_ENGINE_ARGS, Config
from megatron_rlzero.generation import http
from megatron_rlzero.generation.requests import ARGUMENT, ROUTE
from megatron_rlzero.invariance.vllm import BACKEND, Settings
from megatron_rlzero.kernels import backend, libraries
from megatron_rlzero.network import LOOPBACK

MODULE = "vllm.entrypoints.openai.api_server"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
#: of a rank under torchrun; vLLM would take some of them for its own
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
#: Linux's ports for outgoing connections; a server's port is one below them, and from here on
OUTGOING, FIRST_PORT, PORTS_TRIED = Path("/proc/sys/net/ipv4/ip_local_port_range"), 10_000, 100
#: of aligned servers on GPUs: our attention, nothing fused across our operators, a CUDA graph of a decoding step, and
#: NCCL between ranks
GPU_FLAGS = {
    "attention-backend": "CUSTOM",
    "compilation-config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "disable-custom-all-reduce": True,
    "async-scheduling": False,  # as on CPUs, where all of it was tested
    "all2all-backend": "allgather_reducescatter",
}
#: seconds between SIGTERM and SIGKILL
GRACE_S = 5.0
#: seconds that a server of no more use gets to end by itself, so that its own end is what is reported
END_S = 1.0


@dataclass(eq=False)
class Server:
    """A server that we started (``process``, ``log`` and ``index`` are set) or attached to.

    ``name`` is its own: ``origin``, or, where it is not the first of that origin, ``origin``.1, ``origin``.2 ...
    """

    name: str
    url: str
    workers: int
    process: subprocess.Popen | None = None
    log: Path | None = None
    index: int | None = None
    origin: str = ""

    def check_alive(self) -> None:
        """Raises RuntimeError with the exit code and the end of the log if the child process has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(f"{self.name} {how_it_ended(self.process)}{self.end_of_log()}")

    def end(self, reason: str) -> str:
        """Ends a child that is of no more use, at once; how it ended: by itself, or for ``reason``."""
        if self.process is None:
            return f"({self.url}): {reason}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        itself = self.process.poll() is not None
        with contextlib.suppress(ProcessLookupError):  # then nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return how_it_ended(self.process) if itself else f"(pid {self.process.pid}): {reason}"

    def end_of_log(self) -> str:
        """For an error message; nothing where we do not have its log."""
        return f"; the end of {self.log}:\n{tail(self.log)}" if self.log is not None else ""

    def healthy(self, timeout_s: float) -> bool:
        """Whether /health answers 200 within ``timeout_s``."""
        try:
            http.get(f"{self.url}/health", timeout_s)
        except (OSError, http.ServerError):
            return False
        return True


def start(config: Config, index: int, name: str) -> Server:
    """Starts server ``index``; returns at once. Its output goes to RUN_DIR/NAME.log."""
    rollout = config.rollout
    port = rollout.port + index if rollout.port else free_port()
    log = Path(config.run_dir) / f"{name}.log"
    process = spawn(MODULE, flags(config, port), environment(config), log)
    url, workers = f"http://{LOOPBACK}:{port}", rollout.tensor_model_parallel_size
    return Server(name, url, workers, process, log, index, f"server-{index}")


def spawn(
    module: str, arguments: list[str], variables: dict[str, str], log: Path, pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen:
    """``python -m MODULE ARGUMENTS`` as a child that ends with this process.

    It has a session of its own: a Ctrl-C in the terminal reaches rank 0 alone, which ends its children in order.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megatron_rlzero.watch", str(os.getpid()), module, *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def stop(processes: list[subprocess.Popen]) -> None:
    """Ends the children and whatever they started: SIGTERM, GRACE_S later SIGKILL to each one's process group."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):  # then the next lines end it
            process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):  # then nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def how_it_ended(process: subprocess.Popen) -> str:
    """ "(pid N) ended with exit code C", or the signal that killed it."""
    code = process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"(pid {process.pid}) {how}"


def flags(config: Config, port: int, host: str = LOOPBACK) -> list[str]:
    """vLLM's command line. ``rollout.engine_args`` adds to it or overrides it.

    Raises:
        ValueError: ``rollout.engine_args`` names a flag that the rest of the system relies on.
    """
    rollout, hf = config.rollout, read_config(config.model.path)
    values: dict[str, Any] = {
        "host": host,
        "port": port,
        "model": str(config.model.path),
        "dtype": DTYPES[config.model.dtype],
        "tensor-parallel-size": rollout.tensor_model_parallel_size,
        "max-model-len": rollout.max_prompt_tokens + rollout.max_response_tokens,
        "max-num-seqs": rollout.max_num_seqs,
        "generation-config": "vllm",  # no sampling defaults from the model's directory
        "enable-scale-out": True,  # the token-in, token-out route
        "weight-transfer-config": {"backend": BACKEND},
        "logits-processors": "megatron_rlzero.generation.logits_processor:SeededSampling",
        # With stock kernels a hit would make numbers depend on the order of arrival; Mamba states lie by sequence.
        "enable-prefix-caching": config.kernels == "aligned" and architecture(hf).mixer(hf) is None,
        "disable-uvicorn-access-log": True,
    }
    if rollout.token_file:
        values["middleware"] = "megatron_rlzero.generation.token.RequireToken"
    if config.kernels == "aligned" and rollout.tensor_model_parallel_size > 1 and has_experts(hf):
        values["enable-expert-parallel"] = True  # experts stay whole, as on the learner
    if cpu_build():
        values["enforce-eager"] = True
        values["kv-cache-memory-bytes"] = rollout.cpu_kv_cache_gib * 2**30
    elif config.kernels == "aligned":
        values |= GPU_FLAGS
    for name, value in rollout.engine_args.items():
        flag = name.replace("_", "-")
        if flag in RESERVED_ENGINE_ARGS:
            raise ValueError(f"rollout.engine_args.{name} = {value}: set by this project; remove it")
        values[flag] = value
    return [argument for flag, value in values.items() for argument in _arguments(flag, value)]


def has_experts(hf: dict[str, Any]) -> bool:
    """Whether the model has experts of vLLM's; vLLM refuses expert parallelism without."""
    return bool(hf.get("num_experts") or hf.get("num_local_experts"))


def _arguments(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def base_environment() -> dict[str, str]:
    """What servers and client have in common: this process's environment without a rank's variables."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # each process imports thousands of files: byte code saves a minute
    variables.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    return variables


def environment(config: Config) -> dict[str, str]:
    """A server's environment; with ``base_environment`` the only place where variables are set."""
    variables = base_environment()
    token_file = os.path.abspath(config.rollout.token_file) if config.rollout.token_file else ""
    operators = (config.kernels, config.reduction_slices, backend.backend())
    family = os.path.abspath(config.model.family) if config.model.family else ""
    settings = Settings(config.rollout.temperature, *operators, token_file, family)
    variables.update(settings.to_environment())
    variables.update(
        VLLM_SERVER_DEV_MODE="1",  # the routes for weights and pausing
        VLLM_USE_V2_MODEL_RUNNER="0",  # our logits processor has the V1 interface
        VLLM_HOST_IP=LOOPBACK,  # between the processes of one server
        VLLM_NO_USAGE_STATS="1",
    )
    if cpu_build():
        variables.update(
            OMP_NUM_THREADS=str(config.rollout.threads_per_server),
            VLLM_CPU_OMP_THREADS_BIND="nobind",  # learner ranks share the cores
            VLLM_CPU_ATTN_SPLIT_KV="0",  # splitting makes results depend on the batch
            TORCH_COMPILE_DISABLE="1",  # vLLM would compile one function for token ranks that nobody reads
            GLOO_SOCKET_IFNAME="lo",
        )
        for name, value in libraries.settings().items():
            variables.pop(name, None)  # vLLM's own bf16 attention would die of an illegal instruction
            if config.kernels == "aligned":
                variables[name] = value
        if config.rollout.tensor_model_parallel_size == 1:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # model in the engine core: a process fewer to start
    return variables


def cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPUs."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def check_workers(server: Server) -> None:
    """Raises RuntimeError where a server has other workers than the tensor-parallel ranks that the refit plans for."""
    found = http.get(f"{server.url}/get_world_size", timeout_s=30.0).get("world_size")
    if found != server.workers:
        raise RuntimeError(
            f"{server.name} ({server.url}) has {found} workers and rollout.tensor_model_parallel_size = "
            f"{server.workers}; vLLM's data and pipeline parallelism are not supported"
        )


def check_plugin(server: Server) -> None:
    """Sends a request that our logits processor must refuse: a server without it would sample in another way.

    Raises:
        RuntimeError: the server took the request.
    """
    body = {"token_ids": [0], "sampling_params": {"temperature": 0.0, "max_tokens": 1}}
    try:
        http.post(f"{server.url}{ROUTE}", body, timeout_s=60.0)
    except http.ServerError as error:
        if error.status == 400 and ARGUMENT in str(error):
            return
        raise
    raise RuntimeError(
        f"{server.name} ({server.url}) draws tokens without our logits processor; start it with the flags and the "
        "environment of megatron_rlzero/generation/server.py"
    )


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log file."""
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def free_port() -> int:
    """A port that was free a moment ago; a server that finds it taken ends with an error that says so.

    Not one of those that outgoing connections get: until the server listens, a busy client may have come by it.
    """
    first_outgoing = int(OUTGOING.read_text().split()[0])
    choices = range(FIRST_PORT, max(first_outgoing, FIRST_PORT))
    for port in (*random.SystemRandom().sample(choices, min(len(choices), PORTS_TRIED)), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return probe.getsockname()[1]
    raise OSError("this machine has no free port")
