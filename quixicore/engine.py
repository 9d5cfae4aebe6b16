"""The seats: places in the pinned engine where an operation of ours can sit, and how it is put there.

A seat is a function of the engine's, a method, or a Triton kernel's launch. It fits only the source that it was made
for, which its digest names: an engine of another version is refused by name, never patched blindly. Seats form groups;
a profile says for each group who sits there (`dispatch`).

Five ways in: `kernel` is the engine's own registration of another implementation of a Triton kernel
(vllm/triton_utils/dispatcher.py); `function` binds a name of the engine's to ours; `around` does too, and ours gets
the engine's as its first argument. An `addition` gives the engine a name that it does not have;
a `name` is bound in its own module alone, and the whole of that is what it fits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Way = Literal["kernel", "function", "around", "addition", "name"]
_DIGITS = 16


class MisfitError(Exception):
    """A seat that is not as it was."""


@dataclass(frozen=True)
class Seat:
    """One of them.

    Args:
        group: of operations that are chosen together.
        module: of the engine.
        path: name in it, or of a class and its method.
        way: how ours gets there.
        ours: module and name of it below `quixicore`.
        digest: of the engine's source.
    """

    group: str
    module: str
    path: str
    way: Way
    ours: str
    digest: str

    @property
    def name(self) -> str:
        """`module.path`, as the engine writes it."""
        return f"{self.module}.{self.path}"


def digest(real: Any) -> str:
    """The first digits of the SHA-256 of a function's source, as it is written, without its indentation."""
    import inspect  # of use in the engine's processes alone
    import textwrap

    plain = inspect.unwrap(getattr(real, "fn", real))
    source = textwrap.dedent(inspect.getsource(plain))
    return hashlib.sha256(source.encode()).hexdigest()[:_DIGITS]


def take(seats: Iterable[Seat], on_misfit: Callable[[MisfitError], None]) -> None:
    """Have ours sit in these seats, in each module as soon as it is imported; a second time is as once.

    Args:
        seats: of one choice.
        on_misfit: called with what does not fit, in the midst of an import; it is not expected to return.
    """
    from slimserve.engine import import_hook

    by_module: dict[str, list[Seat]] = {}
    for seat in seats:
        by_module.setdefault(seat.module, []).append(seat)
    for module, own in by_module.items():
        sit = functools.partial(_sit_all, own, on_misfit)
        if module in sys.modules:
            sit()
        else:
            import_hook.install(module, after=sit)


def all_taken(seats: Iterable[Seat]) -> bool:
    """Whether ours sit in each of these seats in this process; their modules are imported for it."""
    for seat in seats:
        importlib.import_module(seat.module)
        if seat.name not in _taken:
            return False
    return True


_taken: set[str] = set()


def _sit_all(seats: Iterable[Seat], on_misfit: Callable[[MisfitError], None]) -> None:
    for seat in seats:
        try:
            if seat.name not in _taken:
                _sit(seat)
        except MisfitError as misfit:
            on_misfit(misfit)


def _sit(seat: Seat) -> None:
    module, _, ours_name = seat.ours.partition(":")
    ours = getattr(importlib.import_module(f"quixicore.{module}"), ours_name)
    owner, name = find(seat)
    if seat.way == "addition":
        setattr(owner, name, staticmethod(ours))
        _taken.add(seat.name)
        return
    real = vars(owner)[name]
    if (found := digest(owner if seat.way == "name" else real)) != seat.digest:
        raise MisfitError(f"{seat.name} is not the source that our operation was made for: {found}, not {seat.digest}")
    if seat.way == "name":
        setattr(owner, name, ours)
    elif seat.way == "kernel":
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({seat.name: ours})
    else:
        replacement = functools.partial(ours, real) if seat.way == "around" else ours
        _rebind(owner, name, real, _as_function(replacement, real))
    _taken.add(seat.name)


def find(seat: Seat) -> tuple[Any, str]:
    """The object of the engine that holds a seat, and its name there.

    Raises:
        MisfitError: the engine has no such place.
    """
    *classes, name = seat.path.split(".")
    try:
        owner = functools.reduce(getattr, classes, sys.modules[seat.module])
    except AttributeError:
        raise MisfitError(f"the engine has no {seat.name}") from None
    if (name in vars(owner)) == (seat.way == "addition"):
        raise MisfitError(f"the engine has {'already' if seat.way == 'addition' else 'no'} {seat.name}")
    return owner, name


def _as_function(ours: Callable[..., Any], real: Any) -> Callable[..., Any]:
    # A plain function binds to its instance as a method, which a partial does not.
    @functools.wraps(real)
    def call(*args: Any, **named: Any) -> Any:
        return ours(*args, **named)

    return call


def _rebind(owner: Any, name: str, real: Any, ours: Callable[..., Any]) -> None:
    """Bind ours to the name, and to each copy that another module has made of it by `from ... import`."""
    setattr(owner, name, ours)
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        for copied in [key for key, value in (names or {}).items() if value is real]:
            setattr(module, copied, ours)


# A group, a module below `vllm`, and its seats: the way, the path, ours below `quixicore.seats`, and the digest.
_TABLE = """
platform
  triton_utils.importing
    addition TritonPlaceholder.next_power_of_2 platform:next_power_of_2
  config.vllm
    around VllmConfig._validate_v2_model_runner platform:second_runner 31f64b51fcb7eee6
  models.qwen4_exp.nvidia.qsa
    around Qwen4ExpQSAFlashAttentionImpl.__init__ platform:attention_kernel b1375920293771e2
    around Qwen4ExpQSAAttention.__init__ platform:attention 57959c53ddb127f9
runner
  v1.worker.gpu.input_batch
    kernel _prepare_prefill_inputs_kernel batch:prefill_inputs 96d1b0d0dffd63d4
    kernel _prepare_pos_seq_lens_kernel batch:positions 33c07567a9fe63e1
    kernel _combine_sampled_and_draft_tokens_kernel batch:sampled_and_drafts c02435e0be07b2fa
    kernel _get_num_sampled_and_rejected_kernel batch:sampled_and_rejected 17bfac5e1599de85
    kernel _post_update_kernel batch:after_step 1f8738a0c9e9928a
    kernel _post_update_num_computed_tokens_kernel batch:advance b268224427020033
    kernel _expand_idx_mapping_kernel batch:expand 7636f8d252d474bf
  v1.worker.gpu.sample.prompt_logprob
    kernel _prompt_logprobs_token_ids_kernel batch:prompt_targets 2706dbdcfea541d3
  v1.worker.gpu.buffer_utils
    function StagedWriteTensor.apply_write tables:write_staged 7a5348880ba8b577
    function FusedStagedWriter.apply tables:write_all_staged 224bb78838f7a150
  v1.worker.gpu.block_table
    function BlockTables.gather_block_tables tables:gather 93ff9cd018fc7c7a
    function BlockTables.compute_slot_mappings tables:slot_mappings b14a1488fa7df49b
  v1.worker.utils
    function KVBlockZeroer.zero_block_ids tables:zero_blocks 2b03234628f115ff
  v1.attention.ops.metadata
    kernel _token_request_mapping_kernel batch:requests_of_tokens 1e6bc998d5b47fd0
states
  v1.worker.gpu.model_states.mamba_hybrid
    kernel _scatter_num_accepted_kernel states:note_accepted 3bfefe75dd1765df
    kernel _fill_num_accepted_kernel states:fill_accepted 1c8ea4a64730954d
  v1.worker.mamba_utils
    kernel preprocess_mamba_align_fused_kernel states:advance 1b1f5808e38baaf3
    around MambaSpecDecodeGPUContext._populate_metadata states:remember 21818f5ce3fffcec
    function MambaSpecDecodeGPUContext.run_fused_precopy states:move_on a00a1d9ca3972376
    function MambaSpecDecodeGPUContext.run_fused_postprocess_align states:keep_boundary a903b8dd22657f32
    function MambaSpecDecodeGPUContext.compute_aligned_state_indices states:blocks_of_running 4440cfd995aedcd6
gdn
  model_executor.layers.mamba.ops.cpu.causal_conv1d
    function causal_conv1d_fn_cpu gdn:prefill 9683809d2b2a506b
  model_executor.layers.mamba.ops.cpu.gdn_attention
    name ops gdn:operations 73adac41eac85bdd
    name F gdn:functions 73adac41eac85bdd
sampling
  v1.worker.gpu.sample.gumbel
    kernel _temperature_kernel sampling:temperature 47f8e146ba43476a
    function gumbel_sample sampling:sample fdbaf7f6b7c125dd
  v1.worker.gpu.sample.min_p
    kernel _min_p_kernel sampling:min_p bd9d4defbc342db9
  v1.worker.gpu.sample.penalties
    kernel _penalties_kernel sampling:penalise dee31c4f7bfadbb7
    kernel _bincount_kernel sampling:count_tokens cfb1d5f04fd01d01
  v1.worker.gpu.sample.logit_bias
    kernel _bias_kernel sampling:bias d8897887756bb45c
  v1.worker.gpu.sample.bad_words
    kernel _bad_words_kernel sampling:forbid d615f1d7c7e1715c
  v1.worker.gpu.sample.logprob
    function compute_token_logprobs sampling:log_probabilities d229e86086731ad3
    kernel _ranks_kernel sampling:ranks 9bb31889efc6e892
    kernel _fill_logprob_token_ids_kernel sampling:wanted_tokens a73ab01163401faa
  v1.worker.gpu.structured_outputs
    kernel _apply_grammar_bitmask_kernel sampling:masked_by_grammar 1d93a33523d5a05f
  v1.worker.gpu.metrics.logits
    kernel _num_nans_kernel sampling:not_numbers fefae6b2fd82eaff
drafts
  v1.worker.gpu.spec_decode.target_dependent_ar.speculator
    kernel _prepare_prefill_inputs_kernel drafts:first_inputs b09e3977036c8bde
    kernel _prepare_decode_inputs_kernel drafts:next_inputs 3d1d578a2ad99a42
    kernel _update_draft_inputs_kernel drafts:after_draft 85b4cbc9847f4e27
  v1.worker.gpu.spec_decode.rejection_sampler
    kernel _flatten_sampled_kernel drafts:flatten 8098c9effe74faef
    kernel _gather_draft_sampled_kernel drafts:fed_drafts dd3af44592a1f5cf
  v1.worker.gpu.spec_decode.rejection_sampler_utils
    function rejection_sample drafts:verify fa833427de8892b1
residual
  models.qwen4_exp.nvidia.ops.hc
    function grouped_gemma_rmsnorm residual:norm 013d61f4c7f73860
    function hc_silu residual:low_rank a88c07d3f31f4b19
    function hc_gate_mix residual:mix 03b5b3be477b4c02
    function hc_combine residual:combine c88ce54342516370
    function hc_combine_norm residual:combine_norm 1dd7fb4d705472c6
ngram
  models.qwen4_exp.common.ops.ple
    function ple_gate ngram:gate 6ce57a1c0c27b0e5
    function ple_conv ngram:convolve 0b158bbacb1f8525
linear
  model_executor.layers.utils
    around cpu_unquantized_gemm linear:product f399bc57bd3ce882
qsa
  models.qwen4_exp.nvidia.ops.qsa_prepare
    function qsa_prepare sparse:prepare e4225a8bc1716040
  models.qwen4_exp.nvidia.ops.qsa_indexer
    function qsa_select_paged_decode sparse:choose_decoding 066235f90c21995d
    function qsa_select_paged_prefill sparse:choose_prefilling 71dedc914a7e640b
    function expand_qsa_block_indices sparse:expand 52c5b0adfbda5581
  models.qwen4_exp.nvidia.ops.qsa
    function qsa_sparse_paged_attention sparse:attend db3aefe742afc81f
"""


def _seats(table: str) -> Iterator[Seat]:
    group = module = ""
    for line in table.strip().splitlines():
        way, *words = line.split()
        if words:
            path, ours, *source = words
            yield Seat(group, module, path, cast(Way, way), f"seats.{ours}", "".join(source))
        elif line.startswith(" "):
            module = f"vllm.{way}"
        else:
            group = way


SEATS: tuple[Seat, ...] = tuple(_seats(_TABLE))

GROUPS: Mapping[str, tuple[Seat, ...]] = {
    group: tuple(seat for seat in SEATS if seat.group == group) for group in dict.fromkeys(s.group for s in SEATS)
}
"""The seats of each group."""
