"""Facts of torch functions, by the name under which a mode or a tensor subclass is told of them.

Each set is one fact, and the line below it says what holds of every function with a name in it: the method, the one
of `torch`, the one of `torch.nn.functional`. `tests/sharded/test_functions.py` tries each fact on each of them. A name
that is in no set may do anything. Operators come by these names, too: ``2 - x`` is told as ``__rsub__``, but ``x - 2``
as ``sub`` and ``x -= 2`` as ``sub_``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.private.operators import schema_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def name_of(func: Any) -> str:
    """What the user calls ``func``: a property that is read has its own name, one that is set is ``__set__``.

    Example::

        assert name_of(torch.Tensor.mT.__get__) == "mT"
    """
    name = getattr(func, "__name__", None)
    if name == "__get__":
        func = func.__self__
        name = getattr(func, "__name__", None) or getattr(getattr(func, "fget", None), "__name__", None)
    return str(name or getattr(func, "name", None) or func)  # scripted methods have another attribute for it


def sets_data(func: Any) -> bool:
    """Whether ``func`` is torch's ``x.data = ...``, or what has replaced it."""
    return name_of(func) == "__set__" and getattr(func.__self__, "__name__", "") == "data"


def operator_of(func: Any) -> str:
    """The name of an operator, as `__torch_dispatch__` is told of it; without ``aten::``."""
    return str(schema_of(func).name.removeprefix("aten::"))


def writes(name: str) -> bool:
    """Whether a function writes into its first argument, or changes how that is laid out or differentiated."""
    return name == "__setitem__" or name in IN_PLACE_OPERATORS or name.endswith("_") and not name.endswith("__")


def writes_into(name: str) -> bool:
    """As `writes`, or by `x.data = y`: no other property is set that changes a value."""
    return writes(name) or name == "__set__"


# What Python gets.

TRUTHS = _names("__bool__ is_nonzero equal allclose __contains__")
"""Say yes or no, by entries."""

WHOLE_NUMBERS = _names("__int__ __index__")
"""Give an ``int``, by entries."""

ARRAYS = _names("numpy __array__")
"""Give an array of numpy in the same memory."""

READS = TRUTHS | WHOLE_NUMBERS | ARRAYS | _names("item tolist __float__ __complex__ __format__")
"""Make of a tensor, by its entries, what Python can decide by."""

METADATA = _names("""
dim size numel is_floating_point is_complex is_signed element_size get_device __len__ result_type is_inference is_conj
is_neg is_same_size _is_view has_names __dir__
""")
"""Tell Python what does not go by entries: a shape, a dtype, a device."""

STRIDES = _names("stride storage_offset is_contiguous")
"""Tell Python in which order entries lie in their memory."""

MEMORY = STRIDES | _names("data_ptr untyped_storage")
"""Tell Python where entries lie, or in which order."""

MEMORY_KINDS = _names("is_shared is_pinned")
"""Tell Python in what kind of memory entries lie."""

SHOWS = _names("__repr__")
"""Print entries."""

# Random numbers.

FILLS = _names("uniform_ normal_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_")
"""Draw as many numbers as the tensor has entries, whatever these are, and write each entry."""

DRAWS_EACH = FILLS | _names("""
rand_like randn_like randint_like bernoulli poisson dropout dropout_ alpha_dropout alpha_dropout_ rrelu rrelu_
""")
"""Draw for each entry by itself, or nothing at all where they are told so."""

DRAWS = DRAWS_EACH | _names("""
normal multinomial binomial _standard_gamma _sample_dirichlet native_dropout gumbel_softmax feature_dropout
feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ dropout1d dropout2d dropout3d fractional_max_pool2d
fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices kaiming_uniform_
scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu
""")
"""Take a tensor, and may move the generator on."""

DRAWS_ANEW = _names("rand randn randint randperm")
"""Take no tensor, and draw the entries of one."""

DRAWS_BY_VALUE = _names("poisson binomial _standard_gamma _sample_dirichlet rrelu rrelu_")
"""How many numbers they draw goes by the tensor's entries."""

# What is written.

IN_PLACE_OPERATORS = _names("__iand__ __ior__ __ixor__ __ilshift__ __irshift__")
"""Write into their first argument, though their name has no ``_`` behind."""

WRITES_NO_ENTRY = _names("requires_grad_ detach_ share_memory_ rename_")
"""Have a ``_`` behind their name, and write no entry."""

OVERWRITES = FILLS | _names("zero_ fill_ copy_")
"""Write each entry of the first argument, whatever it was."""

# Entry by entry.

_BY_ENTRY = _names("""
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin
acos atan atan2 sinh cosh tanh sigmoid erf erfc floor ceil round trunc frac sign sgn clamp clamp_min clamp_max clip
where masked_fill add sub subtract mul multiply div divide true_divide floor_divide pow float_power remainder fmod
maximum minimum fmax fmin lerp addcmul addcdiv eq ne lt le gt ge not_equal greater less logical_and logical_or
logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor isnan isinf isfinite isclose nan_to_num hypot
logit xlogy relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign hardtanh hardsigmoid hardswish
log_sigmoid threshold _threshold tanhshrink hardshrink softshrink heaviside copysign clone float double half bfloat16
int long bool cpu cuda zeros_like ones_like empty_like full_like fill
""")

BY_ENTRY = (
    _BY_ENTRY
    | {f"{name}_" for name in _BY_ENTRY if any(hasattr(space, f"{name}_") for space in (Tensor, torch, F))}
    | _names("rsub zero_ __eq__ __rsub__ __rdiv__ __rmod__ __rpow__ __floordiv__ __rfloordiv__ __invert__")
    | _names("__and__ __or__ __xor__ __iand__ __ior__ __ixor__")
)
"""Make each entry, or write it, of the same entries of their arguments, which are broadcast."""

LISTS = frozenset(
    f"_foreach_{name}{behind}"
    for name in _names("""
        abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp expm1 floor frac
        lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt
        sub tan tanh trunc zero
    """)
    for behind in ("", "_")
    if hasattr(torch, f"_foreach_{name}{behind}")
)
"""As `BY_ENTRY`, for each tensor of a list by itself."""

FUSED = _names("_fused_sgd_ _fused_adam_ _fused_adamw_ _fused_adagrad_")
"""An optimizer's step on lists of tensors, entry by entry."""

PRECISIONS = _names("to type type_as float double half bfloat16 cpu cuda")
"""Give the same entries in another dtype or on another device, or the tensor itself."""

LIKES = _names("zeros_like ones_like empty_like full_like")
"""Give a tensor of the same shape, into which no entry goes."""

NEW = _names("new_zeros new_ones new_full new_empty")
"""Read the dtype and device of their first argument alone."""

# Shapes.

LIKE_ANOTHER = _names("to type_as view_as reshape_as expand_as")
"""Take of a second tensor the shape, dtype or device alone, and may return the first."""

SLICES = _names("__getitem__ narrow select split split_with_sizes chunk tensor_split unbind")
"""Give some entries of a dim, or all of it in parts; views, but where a tensor is the index."""

TURNS = _names("t transpose swapaxes swapdims movedim moveaxis permute adjoint T mT H mH")
"""Give views of the same entries in another order of the dims."""

REGROUPS = _names("view reshape view_as reshape_as flatten unflatten ravel squeeze unsqueeze")
"""Give the same entries in the same order in other dims: views where they can be."""

EXPANDS = _names("expand expand_as broadcast_to")
"""Give views in which entries are repeated."""

VALUE_PROPERTIES = _names("T mT H mH real imag data")
"""Properties that hold entries of the tensor."""

VIEWS = SLICES | TURNS | REGROUPS | EXPANDS | _names("diagonal real imag")
"""May return the same memory; no entry is another than it was, but for its sign."""

RESHAPES = SLICES | TURNS | REGROUPS | PRECISIONS | _names("contiguous index_select real data")
"""Give entries of their first argument, each at most once, where no index is told twice."""

PICKS = _names("__getitem__ index_select")
"""Give the entries whose places a tensor may tell."""

INDEXES = _names("__getitem__ __setitem__")
"""``x[...]``"""

SHIFTS = _names("roll rot90")
"""Go by a number modulo a size."""

SIZED = NEW | _names("view reshape unflatten expand broadcast_to repeat tile zeros ones empty full rand randn")
"""Their numbers are sizes, or what all entries are; they lay entries out anew, repeat them, or make or draw each."""

SIZED_BY_SECOND = _names("_pack_padded_sequence _pad_packed_sequence __getitem__ masked_select repeat_interleave")
"""Their second argument tells how many entries they return: lengths, an index, a mask, how often."""

# Sums.

ADDS = _names("add sub subtract rsub __rsub__ add_ sub_ subtract_")
"""Linear in both of their first arguments together, with a sign."""

SCALES = _names("mul multiply mul_ multiply_ matmul mm bmm mv einsum tensordot dot vdot inner outer")
"""Linear in each of two tensors."""

DIVIDES = _names("div divide true_divide div_ divide_ true_divide_")
"""Linear in their first argument."""

STACKS = _names("stack cat concat concatenate hstack vstack dstack")
"""Linear in a list of tensors, which they put side by side."""

LINEAR = (
    VIEWS
    | PRECISIONS
    | _names("""
neg negative positive clone detach detach_ contiguous sum mean index_select diff cumsum tril triu flip roll data
""")
)
"""Linear in their first argument, the others fixed."""

SUMS = _names("""
sum nansum mean count_nonzero cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
kl_div binary_cross_entropy_with_logits poisson_nll_loss soft_margin_loss gaussian_nll_loss cosine_embedding_loss
triplet_margin_loss margin_ranking_loss hinge_embedding_loss multi_margin_loss multilabel_margin_loss
multilabel_soft_margin_loss ctc_loss matmul mm bmm einsum linear dot inner vdot tensordot mv
""")
"""Where they sum over samples, the whole is the sum of what they make of parts, but for a denominator."""

REDUCTIONS = _names("""
sum nansum mean prod max min amax amin aminmax std var std_mean var_mean norm linalg_vector_norm logsumexp median
nanmedian mode kthvalue any all argmax argmin count_nonzero
""")
"""Make one entry of all, or of those along a dim."""

STATISTICS = _names("mean var std var_mean std_mean norm linalg_vector_norm")
"""The reductions that a norm of features is written with."""

SCANS = _names("cumsum cumprod logcumsumexp cummax cummin")
"""Make each entry of those before it along a dim."""

MATRIX_PRODUCTS = _names("linear matmul __rmatmul__ mm bmm einsum addmm baddbmm")
"""Products of matrices: for each entry of the result, as many multiplications as the sum is long."""

CONVOLUTIONS = _names("conv1d conv2d conv3d")
"""Linear in an input and in a weight, which is applied at each place."""

TRANSPOSED_CONVOLUTIONS = _names("conv_transpose1d conv_transpose2d conv_transpose3d")
"""As `CONVOLUTIONS`, from the result back."""

WEIGHTED = MATRIX_PRODUCTS | CONVOLUTIONS | _names("embedding _grouped_mm")
"""Layers apply their weights by these."""

RECURRENT = _names("lstm gru rnn_tanh rnn_relu")
"""Apply weights step by step along a sequence."""

LOWERED = MATRIX_PRODUCTS - {"einsum"} | CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | {"addbmm"}
"""Autocast runs these in low precision, on all devices."""

MAKES_NEW = (
    REDUCTIONS
    | SCANS
    | STACKS
    | _names("""
matmul __rmatmul__ mm bmm mv dot vdot addmm addmv addbmm baddbmm outer ger dist softmax log_softmax topk sort argsort
tril triu
""")
)
"""Make new tensors, and change nothing; their shapes follow from the arguments' shapes."""

# The graph.

HOOKS = _names("register_hook register_post_accumulate_grad_hook")
"""Put a hook on a gradient."""

ASKS = _names("register_hook requires_grad_ retain_grad")
"""Give no other value, and ask autograd for something."""

COPIES = LIKES | {"clone"}
"""Give memory of their own, laid out as the argument."""

# Operators, by what `operator_of` calls them.

SAME_MEMORY_OPERATORS = _names("detach alias lift_fresh")
"""Return the same entries in the same memory."""

COPY_OPERATORS = COPIES | {"_to_copy"}
"""Give a tensor of the same shape in memory of its own."""

DRAWING_OPERATORS = (
    FILLS
    | {name.removesuffix("_") for name in FILLS}
    | _names("""
rand rand_like randn randn_like randint randint_like normal_functional poisson
""")
)
"""Draw each entry by itself, whatever the shape."""

MIXING_OPERATORS = (
    (REDUCTIONS - {"count_nonzero"})
    | SCANS
    | _names("""
_softmax _log_softmax native_batch_norm _native_batch_norm_legit dist
""")
)
"""Make one value of several along a dim, which for most values shows only in some of the results."""
