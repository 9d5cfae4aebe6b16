"""The environment variables that are ours to set and no profile's, known to the registry without all of a launch."""

from __future__ import annotations

ADMISSION_VARIABLE = "SLIMSERVE_ADMISSION"
"""what the door is told"""
GATE_VARIABLE = "SLIMSERVE_GATE"
"""the plan's word, for the engine's processes"""
WORDS_VARIABLE = "SLIMSERVE_GATE_WORDS"
"""the folder of the gate's words, for the engine's processes"""
SEATS_VARIABLE = "SLIMSERVE_SEATS"
"""who sits in the engine's seats, for its processes"""
ACCEPT_VARIABLE = "SLIMSERVE_ACCEPT_LIBRARIES"
"""libraries, by name and comma, whose versions the user vouches for"""
SCRATCH_VARIABLE = "TMPDIR"
"""where the engine's temporary files and sockets go: a folder of each start"""

# What no profile decides: (variable, value, policy).
FIXED_ENVIRONMENT: tuple[tuple[str, str, str], ...] = (
    ("HF_HUB_OFFLINE", "1", "pinned-revision"),
    ("VLLM_NO_USAGE_STATS", "1", "telemetry-off"),
    ("DO_NOT_TRACK", "1", "telemetry-off"),
    ("VLLM_HOST_IP", "127.0.0.1", "loopback"),
)

# Caches of the engine and its compilers: private to one engine version and one profile, so that nobody races for them.
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "xdg",
    "HF_HOME": "huggingface",
}
# No profile may set these.
OWNED = frozenset(
    {
        *CACHES,
        "VLLM_API_KEY",
        ADMISSION_VARIABLE,
        GATE_VARIABLE,
        WORDS_VARIABLE,
        SCRATCH_VARIABLE,
        SEATS_VARIABLE,
        "VLLM_RPC_BASE_PATH",  # else that folder
        "VLLM_PLUGINS",
        *(name for name, _, _ in FIXED_ENVIRONMENT),
        "VLLM_WORKER_MULTIPROC_METHOD",
        "CUDA_VISIBLE_DEVICES",
        "PYTHONUNBUFFERED",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    }
)
