"""Run the Triton kernels that Inductor writes for a GPU with numbers on the CPU.

    python fake_gpu.py --depth=numbers SCRIPT
    compiled = torch.compile(model, backend=interpreter.backend, fullgraph=True)    model on the CPU

The traced graph is moved to a fake cuda:0 and lowered as for an H100; then its wrapper code runs
with CPU tensors: matrix products by ATen, kernels in Triton's interpreter. Triton 3.7.1's
interpreter is wrong for bfloat16 (casts truncate, tl.dot multiplies the raw bits) and loses
elements of atomics with a broadcast mask: both are corrected here.
"""
import dataclasses
from types import SimpleNamespace

import fake_gpu
import numpy as np
import torch
import torch.nn.attention.flex_attention as flex
import triton.language as tl
from torch._guards import detect_fake_mode
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

launched = []    # names of the kernels that ran
running = False  # wrapper code, with CPU tensors


def install() -> None:
    """After fake_gpu.install, and with TRITON_INTERPRET set before Triton was imported."""
    flex._validate_device = lambda *tensors: None  # it refuses to differentiate on a CPU, and can
    flex._apply_kernel_options = with_logsumexp
    for name in dir(libdevice):
        if not name.startswith("_") and callable(getattr(libdevice, name)):
            setattr(libdevice, name, by_numpy(name))
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = float_to_float
    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.binary_op = binary
    InterpreterBuilder.create_atomic_rmw = atomic
    ReduceOps.apply_impl = reduce_fast
    builder = interpreter.interpreter_builder  # no sum of integers is checked for overflow on a GPU
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = replace_once
    guards._empty_strided_cuda = empty_strided
    CachingAutotuner.run = run_largest_tile


original_options = flex._apply_kernel_options


def with_logsumexp(*arguments, **options):
    """FlexAttention asks for it only on CUDA; the backward pass needs it."""
    return {**original_options(*arguments, **options), "OUTPUT_LOGSUMEXP": True}


# --------------------------------------------------------------------------------------------------
# libdevice: the CUDA back end maps its stubs at compile time, here NumPy does
# --------------------------------------------------------------------------------------------------

SAME_NAME = ("tanh", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "sin", "cos", "floor",
             "ceil", "trunc", "abs", "copysign", "fmod")
NUMPY = {name: getattr(np, name) for name in SAME_NAME}
NUMPY |= dict(rsqrt=lambda x: (1 / np.sqrt(x)).astype(x.dtype), pow=np.power, fabs=np.abs,
              nearbyint=np.rint, mul_rn=np.multiply,
              isnan=lambda x: np.isnan(x).astype(np.int32),
              isinf=lambda x: np.isinf(x).astype(np.int32),
              signbit=lambda x: np.signbit(x).astype(np.int32))
NUMPY |= dict(isnand=NUMPY["isnan"], isinff=NUMPY["isinf"], signbitd=NUMPY["signbit"])


def by_numpy(name: str):
    def run(*arguments, _semantic=None, **options):
        if name not in NUMPY:
            raise NotImplementedError(f"libdevice.{name} has no NumPy version in interpreter.py")
        like = next(x for x in arguments if isinstance(x, tl.tensor))
        values = [x.handle.data if isinstance(x, tl.tensor) else x for x in arguments]
        with np.errstate(all="ignore"):
            out = np.asarray(NUMPY[name](*values))
        scalar = tl.int32 if out.dtype.kind == "i" else like.type.scalar
        kind = scalar
        if like.type.is_block():
            kind = tl.block_type(scalar, like.type.get_block_shapes())
        out = out.astype(interpreter._get_np_dtype(scalar))
        return tl.core.tensor(TensorHandle(out, scalar), kind)
    return run


# --------------------------------------------------------------------------------------------------
# bfloat16, which the interpreter keeps as uint16: compute in float32, round to the nearest even
# --------------------------------------------------------------------------------------------------

def widen(handle) -> np.ndarray:
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def narrow(x) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


original = {name: getattr(InterpreterBuilder, name) for name in
            ("cast_impl", "create_fp_to_fp", "create_dot", "binary_op", "create_atomic_rmw")}


def cast(self, source, target):
    before = source.dtype.scalar
    after = target.scalar
    if before == after or tl.bfloat16 not in (before, after):
        return original["cast_impl"](self, source, target)
    x = widen(source)
    if after == tl.bfloat16:
        return TensorHandle(narrow(x.astype(np.float32)), after)
    return TensorHandle(x.astype(interpreter._get_np_dtype(target)), after)


def float_to_float(self, source, target, rounding):
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        return cast(self, source, target)
    return original["create_fp_to_fp"](self, source, target, rounding)


def dot(self, a, b, accumulator, precision, imprecise):
    if a.dtype.scalar != tl.bfloat16:
        return original["create_dot"](self, a, b, accumulator, precision, imprecise)
    product = np.matmul(widen(a), widen(b), dtype=np.float32)
    return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def binary(self, left, right, operation):
    if left.dtype.scalar != tl.bfloat16:
        return original["binary_op"](self, left, right, operation)
    out = operation(widen(left), widen(right))
    return TensorHandle(out if out.dtype == bool else narrow(out), tl.bfloat16)


def atomic(self, operation, pointer, value, mask, *rest):
    """The original's C++ takes every array for contiguous."""
    whole = (TensorHandle(np.ascontiguousarray(x.data), x.dtype) for x in (pointer, value, mask))
    return original["create_atomic_rmw"](self, operation, *whole, *rest)


reduce = ReduceOps.apply_impl


def reduce_fast(self, given):
    """Inductor's maximum and minimum at once: the generic one calls Python for each element."""
    known = {"maximum": np.max, "minimum": np.min}.get(getattr(self.combine_fn, "__name__", ""))
    if known and len(given) == 1 and self.axis is not None:
        return [self.min_max(given[0], val_reduce_op=known)]
    return reduce(self, given)


replace_language = interpreter._patch_lang
replaced = set()


def replace_once(function):
    """Not at every call of a function: that and unchecked sums save a third of the time."""
    modules = frozenset(x.__name__ for x in function.__globals__.values()
                        if x is tl or x is tl.core)
    if modules not in replaced:
        replaced.add(modules)
        replace_language(function)
    return SimpleNamespace(restore=lambda: None)


# --------------------------------------------------------------------------------------------------
# The back end for torch.compile
# --------------------------------------------------------------------------------------------------

guards = torch._C._dynamo.guards
fake_empty = guards._empty_strided_cuda
run_tuner = CachingAutotuner.run


def empty_strided(size, stride, dtype):
    if running:
        return torch.empty_strided(size, stride, dtype=dtype)
    return fake_empty(size, stride, dtype)


def tile_size(config) -> int:
    return np.prod([value for value in config.kwargs.values() if isinstance(value, int)] or [1])


def run_largest_tile(self, *arguments, **options):
    """The fewest programs to interpret."""
    launched.append(self.fn.__name__)
    self.configs = [max(self.configs, key=tile_size)]
    return run_tuner(self, *arguments, **options)


class Runner:
    """A compiled graph, run with CPU tensors."""
    _boxed_call = True

    def __init__(self, compiled):
        self.compiled = compiled

    def __call__(self, arguments):
        global running
        running = True
        try:
            with fake_gpu.OnTheHost():
                return self.compiled(arguments)
        finally:
            running = False


def to_cuda(graph_module):
    def move(leaf):
        on_cpu = isinstance(leaf, (torch.device, str)) and str(leaf) == "cpu"
        return torch.device("cuda", 0) if on_cpu else leaf

    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.op in ("call_function", "call_method"):
                    node.args = torch.fx.node.map_aggregate(node.args, move)
                    node.kwargs = torch.fx.node.map_aggregate(node.kwargs, move)
            module.recompile()
    return graph_module


def backend(graph_module, inputs):
    from torch._inductor import compile_fx
    mode = detect_fake_mode(inputs)

    def fake(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with mode:
            out = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cuda:0")
        if isinstance(leaf, torch.nn.Parameter):
            return torch.nn.Parameter(out, leaf.requires_grad)
        return out.requires_grad_(leaf.requires_grad)

    def compile_inner(graph, inputs, **options):
        compiled = compile_fx.compile_fx_inner(graph, inputs, **options)
        if getattr(compiled, "current_callable", None):
            compiled.current_callable = Runner(compiled.current_callable)
        return compiled

    return compile_fx.compile_fx(to_cuda(graph_module), [fake(leaf) for leaf in inputs],
                                 inner_compile=compile_inner)
