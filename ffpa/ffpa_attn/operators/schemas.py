"""This module has the schemas of the operators torch.ops.ffpa_attn.*, which are a contract (tests/operators/test_ops.py: they only
grow): ring attention and selective checkpointing use them by name.
"""

_RULE = (
    "*, Scalar? scale=None, bool causal=False, str align='bottom_right', SymInt window_left=-1, SymInt window_right=-1, "
    "Scalar softcap=0.0"
)
_HOW = "bool return_lse=True, int? level=None, str acc='f32', int? num_stages=None"
_OFFSETS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_QKV = "Tensor q, Tensor k, Tensor v"
_SAVED = f"Tensor grad_out, Tensor? grad_lse, {_QKV}, Tensor out, Tensor lse"
_DELTA = "Tensor? delta=None"
_SINKS = "Tensor? sinks=None"
_OF_SINKS = "Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor sinks, *, str layout='BHND'"
_DENSE = f"Tensor? mask=None, {_SINKS}, {_RULE}, str layout='BHND', {_HOW}"
_PACKED = f"{_OFFSETS}, {_SINKS}, {_RULE}, {_HOW}"
_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"  # of 8-bit pools
_POOLS = "Tensor k_pages, Tensor v_pages"
_PAGED = (
    "Tensor? cu_seqlens_q, Tensor seqused_k, Tensor? block_table, Tensor? leftpad_k, Tensor? cu_seqlens_k_new, "
    f"SymInt more_k, SymInt max_seqlen_q, SymInt max_seqlen_k, {_SINKS}, {_SCALES}, {_RULE}, {_HOW}"
)
_FP8 = (
    f"{_QKV}, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, {_SINKS}, {_RULE}, "
    "ScalarType out_dtype, bool v_transposed=False, bool return_lse=True"
)

SCHEMAS = (
    f"forward({_QKV}, {_DENSE}) -> (Tensor out, Tensor lse)",
    f"forward_out({_QKV}, Tensor(a!) out, {_DENSE}) -> Tensor lse",
    f"varlen_forward({_QKV}, {_PACKED}) -> (Tensor out, Tensor lse)",
    f"varlen_forward_out({_QKV}, Tensor(a!) out, {_PACKED}) -> Tensor lse",
    f"forward_max_logits({_QKV}, {_DENSE}) -> (Tensor out, Tensor lse, Tensor max_logits)",
    f"forward_out_max_logits({_QKV}, Tensor(a!) out, {_DENSE}) -> (Tensor lse, Tensor max_logits)",
    f"varlen_forward_max_logits({_QKV}, {_PACKED}) -> (Tensor out, Tensor lse, Tensor max_logits)",
    f"varlen_forward_out_max_logits({_QKV}, Tensor(a!) out, {_PACKED}) -> (Tensor lse, Tensor max_logits)",
    f"paged_forward(Tensor q, {_POOLS}, {_PAGED}) -> (Tensor out, Tensor lse)",
    f"paged_forward_out(Tensor q, {_POOLS}, Tensor(a!) out, {_PAGED}) -> Tensor lse",
    f"paged_forward_max_logits(Tensor q, {_POOLS}, {_PAGED}) -> (Tensor out, Tensor lse, Tensor max_logits)",
    f"paged_forward_out_max_logits(Tensor q, {_POOLS}, Tensor(a!) out, {_PAGED}) -> (Tensor lse, Tensor max_logits)",
    "append_to_cache(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor cache_seqlens, "
    f"Tensor? block_table, Tensor? cu_seqlens_k_new, {_SCALES}) -> ()",
    f"backward({_SAVED}, Tensor? mask=None, {_DELTA}, {_RULE}, str layout='BHND', bool mask_grad=False, "
    "bool fp32_grads=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    f"varlen_backward({_SAVED}, {_OFFSETS}, {_DELTA}, {_RULE}, bool fp32_grads=False) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    f"sink_gradient({_OF_SINKS}) -> Tensor dsinks",
    f"sink_gradient_delta({_OF_SINKS}) -> (Tensor dsinks, Tensor delta)",
    f"fp8_forward({_FP8}) -> (Tensor out, Tensor lse)",
    f"fp8_forward_max_logits({_FP8}) -> (Tensor out, Tensor lse, Tensor max_logits)",
)
