"""The configuration: one dataclass tree, read from a YAML file and ``a.b=c`` overrides; the defaults are here.

Parallel sizes carry Megatron's names. ``megatron_rlzero.validation.validate`` checks what types cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: vLLM's flags that the rest of the system relies on; rollout.engine_args may not name them
RESERVED_ENGINE_ARGS = (
    "host",
    "port",
    "model",
    "dtype",
    "logits-processors",
    "weight-transfer-config",
    "tensor-parallel-size",
    "middleware",
)
#: flags of vLLM for what is not supported, and what to do instead
REFUSED_ENGINE_ARGS = {
    "data-parallel-size": "start more servers with rollout.servers",
    "pipeline-parallel-size": "raise rollout.tensor_model_parallel_size",
}


@dataclass
class Model:
    path: str = "???"
    """Hugging Face directory with config.json, safetensors and tokenizer: the policy to start from."""
    dtype: str = "fp32"
    """fp32 | bf16: parameters and activations on both sides. With bf16 the optimizer keeps fp32 main parameters."""
    family: str = ""
    """A Python file that defines the model's family where this package has none; see adding_an_architecture.md."""


@dataclass
class Optimizer:
    lr: float = 2e-4
    lr_decay_style: str = "constant"
    """constant | cosine: after the warm-up."""
    lr_warmup_updates: int = 10
    min_lr: float = 0.0
    """Where the cosine ends, at loop.updates."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel ranks."""


@dataclass
class Learner:
    world_size: int = 2
    """Number of learner ranks; tensor x pipeline x data parallel sizes."""
    tensor_model_parallel_size: int = 1
    """Sequence parallelism is on wherever this is above 1."""
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    """Refused: interleaved pipeline stages are not supported."""
    expert_model_parallel_size: int | None = None
    """By default as many of a pipeline stage's ranks as divide the experts: experts are split before anything is
    replicated. 1 for a dense model."""
    context_parallel_size: int = 1
    """Refused above 1 until it is exact."""
    max_tokens_per_microbatch: int = 4096
    """Responses are packed into microbatches of at most this many tokens; none is ever split."""
    recompute: str = "none"
    """none | selective | full: activations recomputed in the backward pass, as Megatron names them."""
    moe_aux_loss_coeff: float = 0.0
    """Factor of the load-balancing loss of each microbatch; its mean over the tokens of all microbatches is added."""
    moe_z_loss_coeff: float = 0.0
    """Factor of the mean over all tokens of the router's squared logsumexp (ST-MoE, 2022)."""
    moe_router_bias_update_rate: float = 0.0
    threads_per_rank: int = 1
    """CPU threads of each learner rank."""
    timeout_s: float = 600.0
    """Deadline of one collective between learner ranks."""
    optimizer: Optimizer = field(default_factory=Optimizer)


@dataclass
class RolloutConfig:
    servers: int = 1
    """vLLM servers to start as child processes; ignored where urls are given."""
    urls: list[str] = field(default_factory=list)
    """Attach to running servers instead, http://host:port each; megatron-rlzero serve starts one."""
    token_file: str = ""
    """File with the secret that servers ask for; servers beyond loopback need one. Readable by its owner alone."""
    port: int = 0
    """First port for started servers, on loopback; 0 takes free ones."""
    tensor_model_parallel_size: int = 1
    temperature: float = 1.0
    """Scales the logits on both sides. There is no top-p and no top-k: the objective needs full support."""
    max_prompt_tokens: int = 64
    max_response_tokens: int = 16
    max_num_seqs: int = 256
    """Sequences that one server decodes together; it gets an eighth more requests at a time, the others wait."""
    max_retries: int = 2
    """How often a failed response is sampled again before it is recorded as failed."""
    deadline_s: float = 600.0
    """From a response's first request to its recording as failed, retries included. Waiting for a place at a server and
    the time at one that died do not count."""
    max_failed_fraction: float = 0.1
    """The run stops when more than this fraction of an update's responses failed."""
    max_restarts: int = 3
    """How many servers of its own the run starts again after they died; then it goes on with those that are left."""
    threads_per_server: int = 1
    """CPU threads of each server worker."""
    cpu_kv_cache_gib: int = 1
    startup_timeout_s: float = 300.0
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further flags of vLLM's server by name, with dashes or underscores: {max-num-batched-tokens: 512}."""


@dataclass
class Refit:
    every: int = 1
    """Versions between two refits of the servers; at most loop.max_lag + 1."""
    backend: str = "gloo"
    """gloo | nccl: gloo goes through host memory everywhere; nccl needs a GPU of its own for every rank and worker."""
    interface: str = "lo"
    """Network interface over which weights go; lo is this machine alone. The same name on every node."""
    deadline_s: float = 120.0
    """A server that has not taken the weights by then is detached."""


@dataclass
class Loop:
    updates: int = 100
    max_lag: int = 2
    """No token is older than this many versions when it is trained on; 0 is synchronous."""
    prompts_per_update: int = 128
    samples_per_prompt: int = 1
    advantage: str = "batch_mean"
    """batch_mean | rloo | grpo | dr_grpo | reinforce_pp_baseline | none."""
    objective: str = "reinforce_zero"
    """reinforce_zero | flash_reinforce | grpo | no_correction; see objectives.py. Others than the first: to compare."""
    record_every: int = 0
    """Updates between two batches that are kept in run_dir/rollouts, for the command replay; 0 is never."""


@dataclass
class Checkpoint:
    every: int = 0
    """Versions between two checkpoints of the whole run, in run_dir/checkpoints; 0 is never."""
    keep: int = 2
    """The last so many are kept."""
    resume: bool = False
    """Go on with the run in run_dir from its last whole checkpoint, from the start where there is none."""


@dataclass
class Evaluation:
    every: int = 0
    """Updates between held-out evaluations; 0 evaluates at the start and at the end only."""
    prompts: int = 128
    """Held-out prompts, the same each time."""


@dataclass
class Probe:
    every: int = 10
    """Versions between two comparisons of a fixed batch's log-probs, engine against learner; 0 is never."""
    on_mismatch: str = "stop"
    """stop | log: what to do when a byte differs where the weights are the same."""
    tokens: int = 5000
    """Action tokens that the command ``probe`` compares at least."""


@dataclass
class Environment:
    kind: str = "reasoning_gym"
    """reasoning_gym | jsonl."""
    task: str = ""
    """reasoning_gym: name of the data set."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym: keyword arguments of the data set."""
    size: int = 20000
    """reasoning_gym: number of training prompts; held-out prompts follow them in the data set."""
    path: str = ""
    """jsonl: file of {"problem": ..., "answer": ...} lines, graded by math-verify."""
    eval_path: str = ""
    """jsonl: file of held-out problems."""
    prompt_template: str = "{problem}"
    """What the user turn says; {problem} is the problem. The tokenizer's chat template goes around it."""


@dataclass
class Config:
    run_dir: str = "???"
    """Metrics, resolved configuration, best checkpoint and exported policy go here."""
    seed: int = 1
    """Of prompt order and sampling noise."""
    kernels: str = "aligned"
    """aligned | stock: this project's operators on both sides, so that their log-probs are the same bits, or those that
    vLLM and the learner's libraries bring."""
    reduction_slices: int = 4
    """Slices of every sum that tensor parallelism splits: a power of two and a multiple of every tensor-parallel size
    in use, on both sides. Part of the model's arithmetic: another number gives other bits."""
    model: Model = field(default_factory=Model)
    learner: Learner = field(default_factory=Learner)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    refit: Refit = field(default_factory=Refit)
    loop: Loop = field(default_factory=Loop)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    eval: Evaluation = field(default_factory=Evaluation)
    probe: Probe = field(default_factory=Probe)
    environment: Environment = field(default_factory=Environment)
