"""Pretend that this process has an NVIDIA GPU: the CUDA path of a script, checked without one.

    python fake_gpu.py [--card=H100] [--depth=all] [--world_size=8] [--rank=3] [--report=FILE]
                       SCRIPT [ARGUMENT …]

The script runs unedited, with device="cuda". --depth says how far torch.compile goes:
    trace     Dynamo and AOTAutograd only: for collectives and graph breaks
    wrapper   Inductor writes the code that allocates, launches and frees; no kernel is compiled
    ptx       Triton compiles the first configuration of each kernel, which shows its shared memory
    cubin     and ptxas assembles it: registers and spills
    all       every configuration that Inductor would choose from
    numbers   as `all`, on CPU tensors: Triton's interpreter runs the kernels (interpreter.py)
What it did is in fake_gpu.seen, which the script can import, and in the report, as JSON.

Real: Dynamo, AOTAutograd, Inductor, the wrapper code that it writes, Triton, ptxas (of the Triton
wheel). Faked: tensors (shapes, types and devices, no numbers), CUDA's runtime, launches, timing,
NCCL, DDP's reducer. So it shows what compiles, launches, allocates and communicates, and device and
type errors; it never shows that something runs on a GPU. Private interfaces are replaced: torch
2.13.0 and triton 3.7.1 only.
"""
import argparse
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

KIB = 2**10
GIB = 2**30
DEPTHS = ("trace", "wrapper", "ptx", "cubin", "all", "numbers")


@dataclass(frozen=True)
class Card:
    """What the compiler asks about a GPU."""
    name: str
    capability: tuple[int, int]
    shared_limit: int           # bytes of shared memory that one block may opt in to
    processors: int             # streaming multiprocessors
    memory: int                 # bytes

    @property
    def properties(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name=self.name, major=self.capability[0], minor=self.capability[1],
            multi_processor_count=self.processors, total_memory=self.memory, warp_size=32,
            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            shared_memory_per_block=48 * KIB, shared_memory_per_block_optin=self.shared_limit,
            shared_memory_per_multiprocessor=self.shared_limit + KIB, L2_cache_size=50 * 2**20,
            is_integrated=0, is_multi_gpu_board=0, gcnArchName="", uuid="fake")


# From the CUDA programming guide, by compute capability; 1 KiB of a block is the system's.
CARDS = {
    "H100": Card("NVIDIA H100 80GB HBM3", (9, 0), 227 * KIB, 132, 80 * GIB),
    "A100": Card("NVIDIA A100-SXM4-40GB", (8, 0), 163 * KIB, 108, 40 * GIB),
    "3090": Card("NVIDIA GeForce RTX 3090", (8, 6), 99 * KIB, 82, 24 * GIB),
    "4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 99 * KIB, 128, 24 * GIB),
    "B200": Card("NVIDIA B200", (10, 0), 227 * KIB, 148, 180 * GIB),
    "T4": Card("Tesla T4", (7, 5), 64 * KIB, 40, 15 * GIB),
}

# The C++ autograd engine and the pinned allocator ask these; the CPU wheel has no answers.
SHIM = r"""
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <new>
using namespace c10;
namespace {
DeviceIndex which = 0;
Device here() { return Device(kCUDA, which); }
Stream stream() { return Stream(Stream::DEFAULT, here()); }
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  DeviceIndex deviceCount() const noexcept override { return which + 1; }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
};
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return which + 1; }
  DeviceIndex current_device() const override { return which; }
  DeviceIndex getCurrentDevice() const override { return which; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return which + 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
};
struct Pinned final : at::HostAllocator {  // for a loader's thread: ordinary memory will do
  DataPtr allocate(size_t n) override { return GetCPUAllocator()->allocate(n); }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
  DeleterFnPtr raw_deleter() const override { return GetCPUAllocator()->raw_deleter(); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
}
extern "C" void fake_cuda_install(int index) {
  static Guard guard;
  static Pinned pinned;
  which = index;
  impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);
  at::setHostAllocator(DeviceType::CUDA, &pinned, 255);
  // the singleton of the hooks has no data members: put our table of functions in its place
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
"""


@dataclass
class Seen:
    """What the code under test did."""
    kernels: list[dict] = field(default_factory=list)       # one per compiled configuration
    launches: list[tuple] = field(default_factory=list)     # (name, grid) of each Triton launch
    calls: list[str] = field(default_factory=list)          # other operators that reached the GPU
    collectives: list[tuple] = field(default_factory=list)  # (kind, bytes sent by this rank, dtype)
    places: list[int] = field(default_factory=list)         # launches, calls before each collective
    unpipelined: list[str] = field(default_factory=list)    # kernels that fit with one stage only
    storages: dict = field(default_factory=dict)            # live storages: weak reference → bytes
    live_bytes: int = 0
    peak_bytes: int = 0
    largest: tuple = (0, (), None)                          # (bytes, shape, dtype) of a tensor

    def clear(self) -> None:
        for name in ("kernels", "launches", "calls", "collectives", "places", "unpipelined"):
            getattr(self, name).clear()

    def allocated(self, tensor: torch.Tensor) -> None:
        """Count storages as the caching allocator would, without fragments and workspaces."""
        storage = tensor.untyped_storage()
        key = storage._weak_ref()
        size = storage.nbytes()
        if key in self.storages and not torch.UntypedStorage._expired(key):
            torch.UntypedStorage._free_weak_ref(key)
            return
        self.storages[key] = size
        self.live_bytes += size
        if size > self.largest[0]:
            self.largest = (size, tuple(tensor.shape), str(tensor.dtype))
        if self.live_bytes > self.peak_bytes:  # perhaps: some may have been freed meanwhile
            self.forget_freed()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def forget_freed(self) -> None:
        for key in [key for key in self.storages if torch.UntypedStorage._expired(key)]:
            self.live_bytes -= self.storages.pop(key)
            torch.UntypedStorage._free_weak_ref(key)


seen = Seen()
card = CARDS["H100"]
index = 0            # of this rank's GPU
world_size = 1


# --------------------------------------------------------------------------------------------------
# Installing the mocks
# --------------------------------------------------------------------------------------------------

def install(name: str = "H100", device_index: int = 0, depth: str = "all") -> None:
    """Before Dynamo or Inductor are imported: they read what is replaced here."""
    global card, index
    assert "torch._dynamo" not in sys.modules, "install before torch.compile is used"
    card = CARDS[name]
    index = device_index
    ctypes.CDLL(str(build_shim())).fake_cuda_install(device_index)
    mock_runtime()
    mock_fake_tensors()
    mock_triton(depth)
    mock_inductor(depth)
    mock_streams()
    if depth == "trace":
        torch.compile = functools.partial(torch.compile, backend="aot_eager")


def build_shim() -> Path:
    root = Path(torch.__file__).parent
    key = hashlib.sha1((SHIM + torch.__version__ + str(root)).encode()).hexdigest()[:12]
    library = Path(tempfile.gettempdir()) / f"fake_gpu_{key}.so"
    if not library.exists():
        temporary = library.with_suffix(f".{os.getpid()}.tmp")
        subprocess.run(["g++", "-O0", "-w", "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-",
                        f"-I{root}/include", f"-L{root}/lib", "-ltorch_cpu", "-lc10",
                        f"-Wl,-rpath,{root}/lib", "-o", str(temporary)],
                       input=SHIM.encode(), check=True)
        os.replace(temporary, library)
    return library


def nothing(*arguments, **options) -> None:
    pass


def always(value):
    return lambda *arguments, **options: value


def mock_runtime() -> None:
    """What Python asks of CUDA. Each name gets a function of its own: Dynamo's rules need it."""
    for name, value in dict(
            _cuda_getCurrentRawStream=0, _cuda_getDevice=index, _cuda_setDevice=None,
            _cuda_synchronize=None, _cuda_getDeviceCount=index + 1, _cuda_exchangeDevice=index,
            _cuda_maybeExchangeDevice=index,
            _cuda_emptyCache=None, _cuda_isCurrentStreamCapturing=False,
            _cuda_cudaCachingAllocator_is_enabled=True).items():
        setattr(torch._C, name, always(value))
    for name, value in dict(
            is_available=True, device_count=index + 1, current_device=index, set_device=None,
            init=None, is_initialized=True, _lazy_init=None, is_current_stream_capturing=False,
            _is_compiled=True,
            synchronize=None, empty_cache=None, get_device_properties=card.properties,
            get_device_capability=card.capability, get_device_name=card.name,
            is_bf16_supported=card.capability >= (8, 0), _exchange_device=index,
            _maybe_exchange_device=index, memory_allocated=0, max_memory_allocated=0,
            max_memory_reserved=0, mem_get_info=(card.memory, card.memory),
            reset_peak_memory_stats=None,
            set_rng_state=None, manual_seed=None, manual_seed_all=None).items():
        setattr(torch.cuda, name, always(value))
    torch.cuda.get_rng_state = lambda *a, **k: torch.zeros(16, dtype=torch.uint8)
    torch.version.cuda = torch.version.cuda or "13.0"


def mock_fake_tensors() -> None:
    """Fake tensors that a script can print, pin and move, and that never reach for a device."""
    import torch.fx.experimental.proxy_tensor as proxy_tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    FakeTensorMode.avoid_device_init = property(always(True))
    torch._C._set_only_lift_cpu_tensors(True)
    proxy_tensor.CONSTANT_NUMEL_LIMIT = 0  # never evaluate torch.tensor(0.5, device="cuda")

    def item(tensor):  # a script prints its loss, and a fake tensor has none; a flag is unset
        return 0.0 if tensor.is_floating_point() else 0

    def tolist(tensor):
        return item(tensor) if tensor.dim() == 0 else [tolist(row) for row in tensor]

    FakeTensor.item = item
    FakeTensor.tolist = tolist
    FakeTensor.__float__ = lambda tensor: float(item(tensor))
    FakeTensor.__int__ = lambda tensor: int(item(tensor))
    FakeTensor.__bool__ = always(True)  # isfinite().all()
    FakeTensor.__format__ = lambda t, spec: format(item(t), spec) if spec else repr(t)
    FakeTensor.__deepcopy__ = lambda tensor, memo: tensor.detach().clone()
    torch.Tensor.__deepcopy__ = outside_modes(torch.Tensor.__deepcopy__)  # a graph's constants
    FakeTensor.pin_memory = torch.Tensor.pin_memory = lambda tensor, *a, **k: tensor
    torch.utils.swap_tensors = swap_tensors
    torch.random.set_rng_state = nothing  # a copy of the state is fake, too


def outside_modes(function):
    from torch.utils._python_dispatch import _disable_current_modes

    def wrapped(*arguments, **options):
        with _disable_current_modes():
            return function(*arguments, **options)
    return wrapped


def swap_tensors(first, second) -> None:
    """module.to("cuda") swaps parameters; the original refuses those that a fake mode refers to."""
    of_first = dict(first.__dict__)
    of_second = dict(second.__dict__)
    for tensor, attributes in ((first, of_second), (second, of_first)):
        tensor.__dict__.clear()
        tensor.__dict__.update(attributes)
    torch._C._swap_tensor_impl(first, second)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory, that is of spills) per thread, as cuobjdump reads them."""
    import triton
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True,
                              check=True).stdout
    return tuple(int(re.search(key + r":(\d+)", text)[1]) for key in ("REG", "STACK"))


class Utils:
    """Where Triton would load a cubin into the driver, we write down what it needs."""

    def get_device_properties(self, device) -> dict:
        return dict(max_shared_mem=card.shared_limit, max_num_regs=65536, warpSize=32,
                    multiprocessor_count=card.processors)

    def load_binary(self, name, kernel, shared, device) -> tuple:
        registers, spilled = resources(kernel) if kernel else (0, 0)
        seen.kernels.append(dict(name=name, registers=registers, spilled=spilled, shared=shared))
        module = function = 1
        most_threads = 1024
        return module, function, registers, spilled // 4, most_threads

    unload_module = staticmethod(nothing)


class Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, x, y, z, stream, function, *rest) -> None:
        fits = 0 <= x < 2**31 and 0 <= y < 2**16 and 0 <= z < 2**16
        assert fits, f"{self.name}: grid {(x, y, z)}"
        seen.launches.append((self.name, (x, y, z)))


def mock_triton(depth: str) -> None:
    """Triton's NVIDIA back end gets a driver that needs no libcuda."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import GPUDriver
    from triton.runtime import driver

    class Driver(GPUDriver):
        is_active = staticmethod(always(True))

        def __init__(self):
            self.utils = Utils()
            self.launcher_cls = Launcher
            self.get_device_capability = always(card.capability)
            self.get_current_stream = always(0)
            self.get_current_device = always(index)
            self.set_current_device = nothing

        def get_current_target(self):
            return GPUTarget("cuda", 10 * card.capability[0] + card.capability[1], 32)

        def get_active_torch_device(self):
            return torch.device("cuda", index)

        def get_device_interface(self):
            return torch.cuda

        def map_python_to_cpp_type(self, kind):
            from triton.backends.nvidia.driver import ty_to_cpp
            return ty_to_cpp(kind)

        def get_benchmarker(self):
            def benchmark(run, quantiles=None, **options):
                run()
                return [1.0] * len(quantiles) if quantiles else 1.0
            return benchmark

        def get_empty_cache_for_benchmark(self):
            return None

        def clear_cache(self, cache):
            pass

    if depth == "ptx":
        backends["nvidia"].compiler.make_cubin = always(b"")
    backends["nvidia"] = dataclasses.replace(backends["nvidia"], driver=Driver)
    driver.set_active(Driver())


class OnTheHost(TorchDispatchMode):
    """Inductor evaluates tensors of one element for real on the device: let it be the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        def move(leaf):
            on_gpu = isinstance(leaf, torch.device) and leaf.type == "cuda"
            return torch.device("cpu") if on_gpu else leaf
        return function(*tree_map(move, args), **tree_map(move, kwargs or {}))


def on_the_host(function):
    def wrapped(*arguments, **options):
        with OnTheHost():
            return function(*arguments, **options)
    return wrapped


def mock_inductor(depth: str) -> None:
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as config
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache, ExternKernelCaller
    config.compile_threads = 1                  # compile in this process
    config.use_static_triton_launcher = False   # through Triton's CompiledKernel, and so our driver
    config.force_disable_caches = True
    config.benchmark_epilogue_fusion = False    # fuse without timing it
    config.shape_padding = False                # pads odd matrices where timing says that it pays
    CachingAutotuner.bench = always(1.0)        # no timing: all compile, the first wins
    compile_without_pipelining = CachingAutotuner.compile_by_disabling_pipelining
    precompile = CachingAutotuner.precompile

    def note_unpipelined(self, config):  # Inductor's silent way out of a lack of shared memory
        seen.unpipelined.append(self.fn.__name__)
        return compile_without_pipelining(self, config)

    def note_launch(self, *arguments, **options):
        seen.launches.append((self.fn.__name__, None))

    def precompile_first(self, *arguments, **options):
        if self.configs:
            self.configs = self.configs[:1]
        return precompile(self, *arguments, **options)

    def prefer_templates(cls, choices, *arguments, **options):  # in max-autotune
        return {choice: 2.0 if isinstance(choice, ExternKernelCaller) else 1.0
                for choice in choices}

    CachingAutotuner.compile_by_disabling_pipelining = note_unpipelined
    if depth == "wrapper":
        CachingAutotuner.precompile = nothing
        CachingAutotuner.run = note_launch
    if depth in ("ptx", "cubin"):
        CachingAutotuner.precompile = precompile_first
    AlgorithmSelectorCache.benchmark_in_current_process = classmethod(prefer_templates)
    compile_fx.cudagraphify = lambda model, *a, **k: model  # compile, but capture nothing
    Folder.__init__ = on_the_host(Folder.__init__)
    Folder.run = on_the_host(Folder.run)
    # the wrapper code calls these C++ helpers: ours go through the fake mode, which counts them
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device=torch.device("cuda", index))
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: torch.as_strided(
        tensor, size, stride, tensor.storage_offset() + offset)


class Stream:
    """Streams and events, which do nothing."""
    cuda_stream = 0
    device = torch.device("cuda", 0)
    elapsed_time = always(1.0)
    query = always(True)

    def __init__(self, *arguments, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __getattr__(self, name):
        return nothing


def mock_streams() -> None:  # after Dynamo has registered the real classes
    torch.cuda.Event = torch.cuda.Stream = Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()


# --------------------------------------------------------------------------------------------------
# The session: fake tensors, with the checks that cuBLAS and NCCL would make
# --------------------------------------------------------------------------------------------------

aten = torch.ops.aten
SAME_DTYPE = {  # positions of the factors
    aten.mm.default: (0, 1), aten.mm.out: (0, 1), aten.bmm.default: (0, 1), aten.bmm.out: (0, 1),
    aten.addmm.default: (1, 2), aten.addmm.out: (1, 2)}
FREE = {  # these launch nothing
    "empty", "empty_strided", "as_strided", "view", "_unsafe_view", "detach", "alias", "t",
    "transpose", "permute", "slice", "select", "unsqueeze", "squeeze", "expand", "split", "unbind",
    "reshape", "lift_fresh", "unfold", "lift", "new_empty", "empty_like", "new_empty_strided",
    "record_stream", "split_with_sizes", "unsafe_split", "_reshape_alias"}


@contextlib.contextmanager
def session():
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        depth = 0  # an operator may be made of others: only the outermost is a call

        def dispatch(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if function in SAME_DTYPE:
                first, second = (args[position] for position in SAME_DTYPE[function])
                if first.dtype != second.dtype:
                    raise RuntimeError(f"{function}: expected one dtype, got {first.dtype}, "
                                       f"{second.dtype}")
            elif function.namespace == "c10d":
                check_collective(function, args)
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            self.depth += 1
            try:
                result = self.out_variant(function, args, kwargs)
                if result is None:
                    result = super().dispatch(function, types, args, kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0 and TracingContext.try_get() is None:  # run, not traced
                note(function, args, kwargs, result)
            return result

        def out_variant(self, function, args, kwargs):
            """Operators whose out= form has no shape function, as _scaled_mm: by the plain one."""
            out = kwargs.get("out")
            if out is None or function._overloadname != "out":
                return None
            if function.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
                return None
            others = {name: value for name, value in kwargs.items() if name != "out"}
            with self:
                plain = function.overloadpacket.default(*args, **others)
            if plain.shape != out.shape or plain.dtype != out.dtype:
                raise RuntimeError(f"{function}: out is {out.shape} {out.dtype}, not {plain.shape} "
                                   f"{plain.dtype}")
            return out

    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
    for operator in (flex_attention, flex_attention_backward):  # they look up the exact class
        operator.python_key_table[Mode] = operator.python_key_table[FakeTensorMode]
    seen.clear()
    with Mode(allow_non_fake_inputs=True), torch.autograd.set_multithreading_enabled(False):
        yield seen


def note(function, args, kwargs, result) -> None:
    tensors = [leaf for leaf in tree_leaves((args, result))
               if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
    if tensors and function.namespace == "aten" and function._opname not in FREE:
        seen.calls.append(function._opname)
    for tensor in tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            seen.allocated(tensor)


def check_collective(function, args) -> None:
    """PyTorch's fake process group takes anything; NCCL does not."""
    import torch.distributed as dist
    kind = function._schema.name.split("::")[1]
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    group = next((a for a in args
                  if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())), None)
    ranks = dist.get_world_size() if group is None else dist.ProcessGroup.unbox(group).size()

    def need(right: bool, what: str) -> None:
        if not right:
            shapes = [(tuple(t.shape), t.dtype, str(t.device)) for t in tensors[:4]]
            raise RuntimeError(f"{kind}: {what}: {shapes}, {ranks} ranks")

    if kind == "barrier" or not tensors:
        return
    need(all(t.is_cuda for t in tensors), "NCCL needs CUDA tensors")
    need(len({t.dtype for t in tensors}) == 1, "one dtype expected")
    need(all(t.is_contiguous() for t in tensors), "tensors must be contiguous")
    out = args[0]
    given = args[1]
    if kind == "_allgather_base_":
        need(out.numel() == ranks * given.numel(), "the output must be ranks × the input")
    if kind == "_reduce_scatter_base_":
        need(given.numel() == ranks * out.numel(), "the input must be ranks × the output")
    if kind == "allgather_":
        need(len(out[0]) == ranks, "one output per rank expected")
        need(all(t.shape == given[0].shape for t in out[0]), "outputs must be like the input")
    if kind == "reduce_scatter_":
        need(len(given[0]) == ranks, "one input per rank expected")
        need(all(t.shape == out[0].shape for t in given[0]), "inputs must be like the output")
    if kind == "alltoall_base_" and not args[3] and not args[4]:
        need(out.numel() == given.numel(), "the output must be as large as the input")
        need(given.shape[0] % ranks == 0, "equal shares expected")
    sent = given if kind == "_allgather_base_" else tensors[0]
    seen.places.append(len(seen.launches) + len(seen.calls))
    seen.collectives.append((kind, sent.numel() * sent.element_size(), str(sent.dtype)[6:]))


# --------------------------------------------------------------------------------------------------
# Many ranks: a process group that sends nothing, and DDP without its C++ reducer
# --------------------------------------------------------------------------------------------------

def join(rank: int, ranks: int) -> None:
    """From here on, init_process_group makes this process one rank of many that are not there."""
    global world_size
    import torch.distributed as dist
    import torch.nn.parallel
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch.testing._internal.distributed.fake_pg import FakeStore
    original = dist.init_process_group
    world_size = ranks

    def init_process_group(backend=None, *arguments, device_id=None, **options):
        assert device_id == torch.device("cuda", index), f"device_id={device_id}"
        original("fake", store=FakeStore(), rank=rank, world_size=ranks)

    dist.init_process_group = init_process_group
    store = dist.HashStore()
    for number in range(ranks):
        store.set(f"arrived{number}", "")
    dist.TCPStore = lambda *_, **__: store
    torch._C._distributed_c10d.FakeWork.is_completed = always(True)
    CatchErrorsWrapper.__call__ = outside_modes(CatchErrorsWrapper.__call__)  # keeps DDPOptimizer
    torch.nn.parallel.DistributedDataParallel = StandInDDP
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(index), WORLD_SIZE=str(ranks),
                      MASTER_ADDR="localhost", MASTER_PORT="1")


class StandInDDP(torch.nn.Module):
    """DDP's collectives, issued in Python: its reducer reads data pointers, fake tensors have none.

    Buckets are those of the real one, by its own function; each is reduced after its last gradient,
    in order. During the forward pass Dynamo is told so: its DDPOptimizer cuts the graph as for DDP.
    """

    def __init__(self, module, device_ids=None, init_sync=True, forward_sync_buffers=True,
                 gradient_as_bucket_view=False, bucket_cap_mb=25, static_graph=False):
        super().__init__()
        import torch.distributed as dist
        devices = [torch.device(device) for device in device_ids or ()]
        assert devices in ([], [torch.device("cuda", index)])
        self.module = module
        self.bucket_bytes_cap = bucket_cap_mb * 2**20
        self.sync = True
        self.waiting = []
        parameters = [p for p in module.parameters()
                      if p.requires_grad and not getattr(p, "_ddp_ignored", False)]
        if init_sync:
            for tensor in (*parameters, *module.buffers()):  # the real one packs them
                dist.broadcast(tensor.detach(), 0)
        caps = [self.bucket_bytes_cap, self.bucket_bytes_cap]
        if bucket_cap_mb == 25:
            caps[0] = dist._DEFAULT_FIRST_BUCKET_BYTES
        order = parameters[::-1]  # the real one: from the second step on, as gradients come
        numbers, _ = dist._compute_bucket_assignment_by_size(order, caps, [False] * len(order))
        self.buckets = [[order[number] for number in bucket] for bucket in numbers]
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda p, number=number: self.ready(number))

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module, names: list[str]) -> None:
        from torch.nn.parallel.distributed import DistributedDataParallel as Real
        Real._set_params_and_buffers_to_ignore_for_model(module, names)

    @contextlib.contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True

    def forward(self, *inputs):
        from torch.nn.parallel.distributed import DistributedDataParallel as Real
        self.waiting = [len(bucket) for bucket in self.buckets]
        Real._active_ddp_module = self
        try:
            return self.module(*inputs)
        finally:
            Real._active_ddp_module = None

    def ready(self, number: int) -> None:
        self.waiting[number] -= 1
        if self.sync and self.waiting[number] == 0:
            self.reduce(self.buckets[number])

    def reduce(self, bucket: list) -> None:
        import torch.distributed as dist
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad = part.view_as(p)


def report() -> dict:
    """What was seen, for a test in another process."""
    from torch._dynamo.utils import counters
    launches = [name for name, _ in seen.launches]
    return dict(kernels=seen.kernels, launches=launches, calls=seen.calls,
                collectives=seen.collectives, places=seen.places, unpipelined=seen.unpipelined,
                peak_bytes=seen.peak_bytes, largest=seen.largest,
                graphs=counters["stats"]["unique_graphs"],
                graph_breaks=dict(counters["graph_break"]))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--card", choices=CARDS, default="H100")
    parser.add_argument("--depth", choices=DEPTHS, default="all")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--report")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    sys.modules["fake_gpu"] = sys.modules["__main__"]
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: PYTHONPATH can name another
    if options.depth == "numbers":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    install(options.card, options.rank, options.depth)
    if options.world_size > 1:
        join(options.rank, options.world_size)
    if options.depth == "numbers":
        import interpreter
        interpreter.install()
        runpy.run_path(options.script, run_name="__main__")
        return
    try:
        with session():
            runpy.run_path(options.script, run_name="__main__")
    finally:
        if options.report:
            Path(options.report).write_text(json.dumps(report()))


if __name__ == "__main__":
    main(sys.argv[1:])
