"""Run the Triton kernels that Inductor writes for a GPU with numbers on the CPU, in Triton's interpreter.

    compiled = torch.compile(model, backend=gpu_interpreter.backend, fullgraph=True)    model on the CPU

The traced graph is moved to a fake cuda:0 and lowered as for an H100; then its wrapper code runs with CPU
tensors: matrix products by ATen, kernels in the interpreter. Triton 3.7.1's interpreter is wrong for bfloat16
(casts cut off, tl.dot multiplies the raw bits) and loses elements of atomics with a broadcast mask: both are
mended here. Import it before anything that imports Triton: the switch is read then.
"""
import dataclasses
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import fake_gpu  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

fake_gpu.install()

import torch.nn.attention.flex_attention as flex  # noqa: E402
import triton.language as tl  # noqa: E402
from torch._guards import detect_fake_mode  # noqa: E402
from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle  # noqa: E402

launched = []  # names of the kernels that ran

# ------------------------------------------------------------------------------------------------------------
# FlexAttention on CPU tensors: differentiable, it only refuses to; and asked for what training on CUDA asks
# ------------------------------------------------------------------------------------------------------------

flex._validate_device = lambda *tensors: None
apply_options = flex._apply_kernel_options
flex._apply_kernel_options = lambda *a, **k: {**apply_options(*a, **k), "OUTPUT_LOGSUMEXP": True}


# ------------------------------------------------------------------------------------------------------------
# libdevice: the CUDA back end maps its stubs at compile time, here NumPy does
# ------------------------------------------------------------------------------------------------------------

NUMPY = {name: getattr(np, name) for name in ("tanh", "exp", "exp2", "log", "log2", "log1p", "expm1",
                                              "sqrt", "sin", "cos", "floor", "ceil", "trunc", "abs",
                                              "copysign", "fmod")}
NUMPY |= dict(rsqrt=lambda x: (1 / np.sqrt(x)).astype(x.dtype), pow=np.power, fabs=np.abs, nearbyint=np.rint,
              mul_rn=np.multiply,
              isnan=lambda x: np.isnan(x).astype(np.int32), isinf=lambda x: np.isinf(x).astype(np.int32),
              signbit=lambda x: np.signbit(x).astype(np.int32))
NUMPY |= dict(isnand=NUMPY["isnan"], isinff=NUMPY["isinf"], signbitd=NUMPY["signbit"])


def by_numpy(name: str):
    def run(*arguments, _semantic=None, **options):
        if name not in NUMPY:
            raise NotImplementedError(f"libdevice.{name} has no NumPy version in gpu_interpreter.py")
        like = next(x for x in arguments if isinstance(x, tl.tensor))
        with np.errstate(all="ignore"):
            out = np.asarray(NUMPY[name](*(x.handle.data if isinstance(x, tl.tensor) else x
                                           for x in arguments)))
        scalar = tl.int32 if out.dtype.kind == "i" else like.type.scalar
        kind = tl.block_type(scalar, like.type.get_block_shapes()) if like.type.is_block() else scalar
        return tl.core.tensor(TensorHandle(out.astype(interpreter._get_np_dtype(scalar)), scalar), kind)
    return run


for name in dir(libdevice):
    if not name.startswith("_") and callable(getattr(libdevice, name)):
        setattr(libdevice, name, by_numpy(name))


# ------------------------------------------------------------------------------------------------------------
# bfloat16, which the interpreter keeps as uint16: compute in float32, round to the nearest even
# ------------------------------------------------------------------------------------------------------------

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
    kinds = source.dtype.scalar, target.scalar
    if kinds[0] == kinds[1] or tl.bfloat16 not in kinds:
        return original["cast_impl"](self, source, target)
    x = widen(source)
    if kinds[1] == tl.bfloat16:
        return TensorHandle(narrow(x.astype(np.float32)), kinds[1])
    return TensorHandle(x.astype(interpreter._get_np_dtype(target)), kinds[1])


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


def atomic(self, operation, pointer, value, mask, *rest):  # its C++ takes every array for contiguous
    whole = (TensorHandle(np.ascontiguousarray(x.data), x.dtype) for x in (pointer, value, mask))
    return original["create_atomic_rmw"](self, operation, *whole, *rest)


for name, function in dict(cast_impl=cast, create_fp_to_fp=float_to_float, create_dot=dot, binary_op=binary,
                           create_atomic_rmw=atomic).items():
    setattr(InterpreterBuilder, name, function)

reduce = ReduceOps.apply_impl


def reduce_fast(self, given):
    """Inductor's maximum and minimum at once: the generic reduction calls Python for each element."""
    known = {"maximum": np.max, "minimum": np.min}.get(getattr(self.combine_fn, "__name__", ""))
    if known and len(given) == 1 and self.axis is not None:
        return [self.min_max(given[0], val_reduce_op=known)]
    return reduce(self, given)


ReduceOps.apply_impl = reduce_fast

# As on a GPU no sum of integers is checked for overflow, and the language is replaced once, not at every call of a
# function: a third of the time.
interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
replace_language, replaced = interpreter._patch_lang, set()


def replace_once(function):
    modules = frozenset(x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core)
    if modules not in replaced:
        replaced.add(modules)
        replace_language(function)
    return SimpleNamespace(restore=lambda: None)


interpreter._patch_lang = replace_once


# ------------------------------------------------------------------------------------------------------------
# The back end for torch.compile
# ------------------------------------------------------------------------------------------------------------

running = False
guards = torch._C._dynamo.guards
fake_empty = guards._empty_strided_cuda
run_tuner = CachingAutotuner.run


def empty_strided(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype) if running else fake_empty(size, stride, dtype)


def run_largest_tile(self, *arguments, **options):  # the fewest programs to interpret
    launched.append(self.fn.__name__)
    self.configs = [max(self.configs, key=lambda config: np.prod(
        [value for value in config.kwargs.values() if isinstance(value, int)] or [1]))]
    return run_tuner(self, *arguments, **options)


guards._empty_strided_cuda, CachingAutotuner.run = empty_strided, run_largest_tile


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
        out.requires_grad_(leaf.requires_grad)
        return torch.nn.Parameter(out, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else out

    def compile_inner(graph, inputs, **options):
        compiled = compile_fx.compile_fx_inner(graph, inputs, **options)
        if getattr(compiled, "current_callable", None):
            compiled.current_callable = Runner(compiled.current_callable)
        return compiled

    return compile_fx.compile_fx(to_cuda(graph_module), [fake(leaf) for leaf in inputs],
                                 inner_compile=compile_inner)
