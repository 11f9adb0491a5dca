"""Pretend that this process has an NVIDIA GPU: the CUDA path of a script, checked without one.

    import fake_gpu; fake_gpu.install("H100")            before torch._dynamo or _inductor are imported
    with fake_gpu.session() as seen: train_step()        the code under test, written for device="cuda"
    seen.kernels, seen.launches, seen.calls, seen.collectives, seen.peak_bytes, seen.largest

    FAKE_CARD=H100 FAKE_RANK=3 FAKE_WORLD=8 python fake_gpu.py SCRIPT [ARGUMENT …]    a whole script, unedited

Real: Dynamo, AOTAutograd, Inductor, the wrapper code that it writes, Triton, ptxas (of the Triton wheel).
Faked: tensors (shapes, types and devices, no numbers), CUDA's runtime, launches, timing, NCCL, DDP's reducer.
So it shows what compiles, launches, allocates and communicates, and what device and type errors there are; it
never shows that something runs on a GPU. Private interfaces are replaced: torch 2.13.0 and triton 3.7.1 only.
"""
import contextlib
import ctypes
import dataclasses
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

KIB, GIB = 2**10, 2**30


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
            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
            shared_memory_per_block=48 * KIB, shared_memory_per_block_optin=self.shared_limit,
            shared_memory_per_multiprocessor=self.shared_limit + KIB, L2_cache_size=50 * 2**20,
            is_integrated=0, is_multi_gpu_board=0, gcnArchName="", uuid="fake")


# CUDA programming guide, technical specifications per compute capability; 1 KiB a block is the system's.
CARDS = {
    "H100": Card("NVIDIA H100 80GB HBM3", (9, 0), 227 * KIB, 132, 80 * GIB),
    "A100": Card("NVIDIA A100-SXM4-40GB", (8, 0), 163 * KIB, 108, 40 * GIB),
    "3090": Card("NVIDIA GeForce RTX 3090", (8, 6), 99 * KIB, 82, 24 * GIB),
    "4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 99 * KIB, 128, 24 * GIB),
    "B200": Card("NVIDIA B200", (10, 0), 227 * KIB, 148, 180 * GIB),
    "T4": Card("Tesla T4", (7, 5), 64 * KIB, 40, 15 * GIB),
}

# The C++ autograd engine and the pinned allocator ask these; the CPU wheel has no answers of its own.
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
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
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
    kernels: list[dict] = field(default_factory=list)       # one per compiled configuration of a kernel
    launches: list[tuple] = field(default_factory=list)     # (name, grid) of each Triton launch
    calls: list[str] = field(default_factory=list)          # other operators that reached the device
    collectives: list[tuple] = field(default_factory=list)  # (kind, bytes sent by this rank, dtype)
    places: list[int] = field(default_factory=list)         # launches and calls before each collective
    unpipelined: list[str] = field(default_factory=list)    # kernels that fitted only with a single stage
    storages: dict = field(default_factory=dict)            # live device storages: weak reference → bytes
    live_bytes: int = 0
    peak_bytes: int = 0
    largest: tuple = (0, (), None)                          # (bytes, shape, dtype) of the largest tensor

    def clear(self) -> None:
        for name in ("kernels", "launches", "calls", "collectives", "places", "unpipelined"):
            getattr(self, name).clear()

    def allocated(self, tensor: torch.Tensor) -> None:
        """Meter the storages as the caching allocator would; fragments and workspaces are not in it."""
        storage = tensor.untyped_storage()
        key, size = storage._weak_ref(), storage.nbytes()
        if key in self.storages and not torch.UntypedStorage._expired(key):
            torch.UntypedStorage._free_weak_ref(key)
            return
        self.storages[key] = size
        self.live_bytes += size
        self.largest = max(self.largest, (size, tuple(tensor.shape), str(tensor.dtype)), key=lambda x: x[0])
        if self.live_bytes > self.peak_bytes:  # perhaps: only then look for what was freed meanwhile
            self.forget_freed()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def forget_freed(self) -> None:
        for key in [key for key in self.storages if torch.UntypedStorage._expired(key)]:
            self.live_bytes -= self.storages.pop(key)
            torch.UntypedStorage._free_weak_ref(key)


seen = Seen()
card = CARDS["H100"]
index = 0


# ------------------------------------------------------------------------------------------------------------
# Installing the mocks
# ------------------------------------------------------------------------------------------------------------

def install(name: str = "H100", device_index: int = 0, configs: str = "all", assemble: bool = True) -> None:
    """configs: of each kernel, compile all configurations, the first, or none: only note its launches.
    Without assembling, compiling ends before ptxas, which takes most of the time: no registers, no spills.
    """
    global card, index
    assert "torch._inductor.compile_fx" not in sys.modules, "install before torch.compile is used"
    card, index = CARDS[name], device_index
    ctypes.CDLL(str(build_shim())).fake_cuda_install(device_index)
    mock_runtime()
    mock_fake_tensors()
    mock_triton(assemble)
    mock_inductor(configs)
    mock_streams()


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
            _cuda_getCurrentRawStream=0, _cuda_getDevice=index, _cuda_setDevice=None, _cuda_synchronize=None,
            _cuda_getDeviceCount=index + 1, _cuda_exchangeDevice=index, _cuda_maybeExchangeDevice=index,
            _cuda_emptyCache=None, _cuda_isCurrentStreamCapturing=False,
            _cuda_cudaCachingAllocator_is_enabled=True).items():
        setattr(torch._C, name, always(value))
    for name, value in dict(
            is_available=True, device_count=index + 1, current_device=index, set_device=None, init=None,
            is_initialized=True, _lazy_init=None, is_current_stream_capturing=False, _is_compiled=True,
            synchronize=None, empty_cache=None, get_device_properties=card.properties,
            get_device_capability=card.capability, get_device_name=card.name,
            is_bf16_supported=card.capability >= (8, 0), _exchange_device=index,
            _maybe_exchange_device=index, memory_allocated=0, max_memory_allocated=0,
            max_memory_reserved=0, mem_get_info=(card.memory, card.memory), reset_peak_memory_stats=None,
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
    proxy_tensor.CONSTANT_NUMEL_LIMIT = 0  # tracing must not evaluate torch.tensor(0.5, device="cuda")

    def item(tensor):  # a script prints its loss, and a fake tensor has none; a flag is not set
        return 0.0 if tensor.is_floating_point() else 0

    def tolist(tensor):
        return item(tensor) if tensor.dim() == 0 else [tolist(row) for row in tensor]

    FakeTensor.item, FakeTensor.tolist = item, tolist
    FakeTensor.__float__, FakeTensor.__int__ = lambda t: float(item(t)), lambda t: int(item(t))
    FakeTensor.__bool__ = always(True)  # isfinite().all()
    FakeTensor.__format__ = lambda t, spec: format(item(t), spec) if spec else repr(t)
    FakeTensor.__deepcopy__ = lambda tensor, memo: tensor.detach().clone()
    torch.Tensor.__deepcopy__ = outside_modes(torch.Tensor.__deepcopy__)  # constants of a graph are real
    FakeTensor.pin_memory = torch.Tensor.pin_memory = lambda tensor, *a, **k: tensor
    torch.utils.swap_tensors = swap_tensors


def outside_modes(function):
    from torch.utils._python_dispatch import _disable_current_modes

    def wrapped(*arguments, **options):
        with _disable_current_modes():
            return function(*arguments, **options)
    return wrapped


def swap_tensors(first, second) -> None:
    """module.to("cuda") swaps parameters in place; the original refuses those that a fake mode refers to."""
    of_first, of_second = dict(first.__dict__), dict(second.__dict__)
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
        return 1, 1, registers, spilled // 4, 1024  # module, function, registers, spills, threads at most

    unload_module = staticmethod(nothing)


class Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, x, y, z, stream, function, *rest) -> None:
        assert 0 <= x < 2**31 and 0 <= y < 2**16 and 0 <= z < 2**16, f"{self.name}: grid {(x, y, z)}"
        seen.launches.append((self.name, (x, y, z)))


def mock_triton(assemble: bool) -> None:
    """Triton's NVIDIA back end gets a driver that needs no libcuda."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import GPUDriver
    from triton.runtime import driver

    class Driver(GPUDriver):
        is_active = staticmethod(always(True))

        def __init__(self):
            self.utils, self.launcher_cls = Utils(), Launcher
            self.get_device_capability, self.get_current_stream = always(card.capability), always(0)
            self.get_current_device, self.set_current_device = always(index), nothing

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
            return lambda run, quantiles=None, **k: (run(), [1.0] * len(quantiles) if quantiles else 1.0)[1]

        def get_empty_cache_for_benchmark(self):
            return None

        def clear_cache(self, cache):
            pass

    if not assemble:
        backends["nvidia"].compiler.make_cubin = always(b"")
    backends["nvidia"] = dataclasses.replace(backends["nvidia"], driver=Driver)
    driver.set_active(Driver())


class OnTheHost(TorchDispatchMode):
    """Inductor evaluates tensors of one element for real on the device: let it be the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        def move(leaf):
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf
        return function(*tree_map(move, args), **tree_map(move, kwargs or {}))


def on_the_host(function):
    def wrapped(*arguments, **options):
        with OnTheHost():
            return function(*arguments, **options)
    return wrapped


def mock_inductor(configs: str) -> None:
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as config
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache, ExternKernelCaller
    config.compile_threads = 1                  # compile in this process
    config.use_static_triton_launcher = False   # through Triton's CompiledKernel, and so our driver
    config.force_disable_caches = True
    config.benchmark_epilogue_fusion = False    # fuse without timing it
    CachingAutotuner.bench = always(1.0)        # no timing: all configurations compile, the first wins
    retry = CachingAutotuner.compile_by_disabling_pipelining  # Inductor's silent way out of a lack
    CachingAutotuner.compile_by_disabling_pipelining = lambda self, config: (
        seen.unpipelined.append(self.fn.__name__), retry(self, config))[1]
    if configs == "none":
        CachingAutotuner.precompile = nothing
        CachingAutotuner.run = lambda self, *a, **k: seen.launches.append((self.fn.__name__, None))
    if configs == "first":
        precompile = CachingAutotuner.precompile
        CachingAutotuner.precompile = lambda self, *a, **k: (
            setattr(self, "configs", self.configs and self.configs[:1]), precompile(self, *a, **k))[1]
    AlgorithmSelectorCache.benchmark_in_current_process = classmethod(  # max-autotune: templates win
        lambda cls, choices, *a, **k: {choice: 2.0 if isinstance(choice, ExternKernelCaller) else 1.0
                                       for choice in choices})
    compile_fx.cudagraphify = lambda model, *a, **k: model  # compile, but capture nothing
    Folder.__init__, Folder.run = on_the_host(Folder.__init__), on_the_host(Folder.run)
    # the wrapper code calls these C++ helpers: ours go through the fake mode, which sees and meters them
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device=torch.device("cuda", index))
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: torch.as_strided(
        tensor, size, stride, tensor.storage_offset() + offset)


class Stream:
    """Streams and events, which do nothing."""
    cuda_stream, device = 0, torch.device("cuda", 0)
    elapsed_time, query = always(1.0), always(True)

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


# ------------------------------------------------------------------------------------------------------------
# The session: fake tensors, with the checks that cuBLAS and NCCL would make
# ------------------------------------------------------------------------------------------------------------

aten = torch.ops.aten
SAME_DTYPE = {aten.mm.default: (0, 1), aten.mm.out: (0, 1), aten.bmm.default: (0, 1), aten.bmm.out: (0, 1),
              aten.addmm.default: (1, 2), aten.addmm.out: (1, 2)}
FREE = ("empty", "empty_strided", "as_strided", "view", "_unsafe_view", "detach", "alias", "t", "transpose",
        "permute", "slice", "select", "unsqueeze", "squeeze", "expand", "split", "unbind", "reshape",
        "lift_fresh", "unfold", "lift", "new_empty", "empty_like", "new_empty_strided", "record_stream")


@contextlib.contextmanager
def session():
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        depth = 0  # an operator may be made of others: only the outermost is a call

        def dispatch(self, function, types, args=(), kwargs={}):
            if function in SAME_DTYPE:
                first, second = (args[position] for position in SAME_DTYPE[function])
                if first.dtype != second.dtype:
                    raise RuntimeError(f"{function}: expected one dtype, got {first.dtype}, {second.dtype}")
            elif function.namespace == "c10d":
                check_collective(function, args)
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            self.depth += 1
            try:
                result = self.out_variant(function, args, kwargs)
                result = super().dispatch(function, types, args, kwargs) if result is None else result
            finally:
                self.depth -= 1
            if self.depth == 0 and TracingContext.try_get() is None:  # it runs, it is not being traced
                note(function, args, result)
            return result

        def out_variant(self, function, args, kwargs):
            """Operators whose out= form has no shape function, as _scaled_mm: by the plain one."""
            out = kwargs.get("out")
            if out is None or function._overloadname != "out" or function.has_kernel_for_dispatch_key(
                    torch._C.DispatchKey.Meta):
                return None
            with self:
                plain = function.overloadpacket.default(
                    *args, **{name: value for name, value in kwargs.items() if name != "out"})
            if (plain.shape, plain.dtype) != (out.shape, out.dtype):
                raise RuntimeError(f"{function}: out is {out.shape} {out.dtype}, not {plain.shape} "
                                   f"{plain.dtype}")
            return out

    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
    for operator in (flex_attention, flex_attention_backward):  # they look the mode up by its exact class
        operator.python_key_table[Mode] = operator.python_key_table[FakeTensorMode]
    seen.clear()
    with Mode(allow_non_fake_inputs=True), torch.autograd.set_multithreading_enabled(False):
        yield seen


def note(function, args, result) -> None:
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
    ranks = dist.ProcessGroup.unbox(group).size() if group is not None else dist.get_world_size()

    def need(right: bool, what: str) -> None:
        if not right:
            shapes = [(tuple(t.shape), t.dtype, str(t.device)) for t in tensors[:4]]
            raise RuntimeError(f"{kind}: {what}: {shapes}, {ranks} ranks")

    if kind == "barrier" or not tensors:
        return
    need(all(t.is_cuda for t in tensors), "NCCL needs CUDA tensors")
    need(len({t.dtype for t in tensors}) == 1, "one dtype expected")
    need(all(t.is_contiguous() for t in tensors), "tensors must be contiguous")
    out, given = args[0], args[1]
    if kind == "_allgather_base_":
        need(out.numel() == ranks * given.numel(), "the output must be ranks × the input")
    if kind == "_reduce_scatter_base_":
        need(given.numel() == ranks * out.numel(), "the input must be ranks × the output")
    if kind == "allgather_":
        need(len(out[0]) == ranks and all(t.shape == given[0].shape for t in out[0]), "list of outputs")
    if kind == "reduce_scatter_":
        need(len(given[0]) == ranks and all(t.shape == out[0].shape for t in given[0]), "list of inputs")
    if kind == "alltoall_base_" and not args[3] and not args[4]:
        need(out.numel() == given.numel() and given.shape[0] % ranks == 0, "equal shares")
    sent = given if kind == "_allgather_base_" else tensors[0]
    seen.places.append(len(seen.launches) + len(seen.calls))
    seen.collectives.append((kind, sent.numel() * sent.element_size(), str(sent.dtype)[6:]))


# ------------------------------------------------------------------------------------------------------------
# Many ranks: a process group that sends nothing, and DDP without its C++ reducer
# ------------------------------------------------------------------------------------------------------------

def join(rank: int, world_size: int) -> None:
    """From here on, init_process_group makes this process one rank of many that are not there."""
    import torch.distributed as dist
    import torch.nn.parallel
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch.testing._internal.distributed.fake_pg import FakeStore
    original = dist.init_process_group

    def init_process_group(backend=None, *arguments, device_id=None, **options):
        assert device_id == torch.device("cuda", index), f"device_id={device_id}"
        original("fake", store=FakeStore(), rank=rank, world_size=world_size)

    dist.init_process_group = init_process_group
    torch._C._distributed_c10d.FakeWork.is_completed = always(True)
    CatchErrorsWrapper.__call__ = outside_modes(CatchErrorsWrapper.__call__)  # DDPOptimizer stays in
    torch.nn.parallel.DistributedDataParallel = StandInDDP
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(index), WORLD_SIZE=str(world_size))


class StandInDDP(torch.nn.Module):
    """DDP's reducer reads data pointers, which fake tensors have not: the same collectives, issued in Python.

    Buckets are those of the real one, by its own function; each is reduced once its last gradient has come,
    in order. While the forward runs, Dynamo is told so: its DDPOptimizer cuts the graph as it would for DDP.
    """

    def __init__(self, module, device_ids=None, forward_sync_buffers=True, gradient_as_bucket_view=False,
                 bucket_cap_mb=25, static_graph=False):
        super().__init__()
        import torch.distributed as dist
        assert not device_ids or [torch.device(d) for d in device_ids] == [torch.device("cuda", index)]
        self.module, self.bucket_bytes_cap = module, bucket_cap_mb * 2**20
        self.sync, self.waiting, self.buckets = True, [], []
        parameters = [p for p in module.parameters() if p.requires_grad]
        for tensor in (*parameters, *module.buffers()):  # the real one packs them; the bytes are the same
            dist.broadcast(tensor.detach(), 0)
        caps = [dist._DEFAULT_FIRST_BUCKET_BYTES if bucket_cap_mb == 25 else self.bucket_bytes_cap,
                self.bucket_bytes_cap]
        order = parameters[::-1]  # from the second step on, buckets follow the order in which gradients come
        numbers, _ = dist._compute_bucket_assignment_by_size(order, caps, [False] * len(order))
        self.buckets = [[order[number] for number in bucket] for bucket in numbers]
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda p, number=number: self.ready(number))

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
    return dict(kernels=seen.kernels, launches=[name for name, _ in seen.launches], calls=seen.calls,
                collectives=seen.collectives, places=seen.places, unpipelined=seen.unpipelined,
                peak_bytes=seen.peak_bytes, largest=seen.largest,
                graphs=counters["stats"]["unique_graphs"], graph_breaks=dict(counters["graph_break"]))


def trace_only() -> None:
    """Stop before Inductor: for questions that are not about kernels, in a tenth of the time."""
    compile = torch.compile
    torch.compile = lambda model, **options: compile(model, **options, backend="aot_eager")


def main(script: str, *arguments: str) -> None:
    """Run a script as it is; FAKE_REPORT names a file for what was seen."""
    rank, ranks = int(os.environ.get("FAKE_RANK", 0)), int(os.environ.get("FAKE_WORLD", 1))
    sys.modules["fake_gpu"] = sys.modules["__main__"]
    install(os.environ.get("FAKE_CARD", "H100"), rank if ranks > 1 else 0)
    if ranks > 1:
        join(rank, ranks)
    if os.environ.get("FAKE_TRACE_ONLY"):
        trace_only()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with session():
            runpy.run_path(script, run_name="__main__")
    finally:
        if "FAKE_REPORT" in os.environ:
            Path(os.environ["FAKE_REPORT"]).write_text(json.dumps(report()))


if __name__ == "__main__":
    main(*sys.argv[1:])
