// CPU memory that passes for a CUDA device in a CPU build of torch: tensors say device "cuda:i", dispatch to the CUDA key,
// are refused beside CPU tensors as CUDA's kernels refuse them, and are computed by the CPU's kernels.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::IValue;
constexpr auto kCuda = DeviceType::CUDA;
constexpr int kMost = 64;  // devices

int device_count() {
  static int n = [] {
    auto asked = std::getenv("FAKECUDA_DEVICES");
    return asked ? std::min(atoi(asked), kMost) : 16;
  }();
  return n;
}
thread_local c10::DeviceIndex current = 0;
c10::DeviceIndex exchange_device(c10::DeviceIndex i) {
  auto old = current;
  if (i >= 0) current = i;
  return old;
}
c10::DeviceIndex index_of(Device d) { return d.index() < 0 ? current : d.index(); }

// ------------------------------------------------------------------ what is told to Python
PyObject* listener = nullptr;
void tell(const char* what, const std::string& op, int64_t bytes) {
  if (!listener) return;
  py::gil_scoped_acquire gil;
  py::handle call = listener;
  call(what, op, bytes);
}

// ------------------------------------------------------------------ memory
struct FakeAllocator final : c10::Allocator {
  static void release(void* p) { std::free(p); }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? std::aligned_alloc(512, (n + 511) / 512 * 512) : nullptr;
    return {p, p, &release, Device(kCuda, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
FakeAllocator allocator;
REGISTER_ALLOCATOR(kCuda, &allocator);

// Host memory that a device can read by itself: known by its addresses
struct PinnedAllocator final : c10::Allocator {
  inline static std::mutex mutex;
  inline static std::map<const char*, size_t> sizes;
  static void release(void* p) {
    std::lock_guard lock(mutex);
    sizes.erase(static_cast<char*>(p));
    std::free(p);
  }
  static bool holds(const void* p) {
    std::lock_guard lock(mutex);
    auto next = sizes.upper_bound(static_cast<const char*>(p));
    if (next == sizes.begin()) return false;
    auto [start, size] = *std::prev(next);
    return static_cast<const char*>(p) < start + size;
  }
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, Device(DeviceType::CPU)};
    void* p = std::aligned_alloc(64, (n + 63) / 64 * 64);
    std::lock_guard lock(mutex);
    sizes[static_cast<char*>(p)] = n;
    return {p, p, &release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator pinned;

// ------------------------------------------------------------------ devices and streams
// Kernels run at once in the host's thread; a stream is a number, and which is current is kept as CUDA does, by thread.
thread_local std::array<c10::StreamId, kMost> streams{};
std::atomic<c10::StreamId> newest_stream{0};
c10::Stream stream_of(c10::DeviceIndex i) { return c10::Stream(c10::Stream::UNSAFE, Device(kCuda, i), streams[i]); }

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  FakeGuard() = default;
  explicit FakeGuard(DeviceType) {}
  DeviceType type() const override { return kCuda; }
  Device exchangeDevice(Device d) const override { return Device(kCuda, exchange_device(d.index())); }
  Device getDevice() const override { return Device(kCuda, current); }
  void setDevice(Device d) const override { exchange_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { exchange_device(d.index()); }
  c10::Stream getStream(Device d) const override { return stream_of(index_of(d)); }
  c10::Stream getDefaultStream(Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(kCuda, index_of(d)));
  }
  c10::Stream getNewStream(Device d, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(kCuda, index_of(d)), ++newest_stream);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = stream_of(index_of(s.device()));
    streams[index_of(s.device())] = s.id();
    return old;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)device_count(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { tell("wait", "stream.synchronize", 0); }
  void synchronizeEvent(void*) const override { tell("wait", "event.synchronize", 0); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);

// ------------------------------------------------------------------ generators: a seed and an offset, as Philox has
struct FakeGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit FakeGenerator(c10::DeviceIndex i)
      : c10::GeneratorImpl(Device(kCuda, i), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t s) override {
    seed_ = s;
    offset_ = 0;
  }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    std::memcpy(t.data_ptr(), &seed_, 8);
    std::memcpy((char*)t.data_ptr() + 8, &offset_, 8);
    return t.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& s) override {
    TORCH_CHECK(s.numel() == 16 && s.device().is_cpu(), "RNG state of a fake CUDA generator must be 16 bytes on the CPU");
    std::memcpy(&seed_, s.data(), 8);
    std::memcpy(&offset_, (const char*)s.data() + 8, 8);
  }
  FakeGenerator* clone_impl() const override {
    auto g = new FakeGenerator(device().index());
    g->seed_ = seed_;
    g->offset_ = offset_;
    return g;
  }
};
std::vector<at::Generator>& generators() {
  static auto* all = [] {
    auto v = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); i++) v->push_back(at::make_generator<FakeGenerator>((c10::DeviceIndex)i));
    return v;
  }();
  return *all;
}

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i = -1) const override { return generators()[i < 0 ? current : i]; }
  at::Generator getNewGenerator(c10::DeviceIndex i = -1) const override {
    return at::make_generator<FakeGenerator>(i < 0 ? current : i);
  }
  Device getDeviceFromPtr(void*) const override { return Device(kCuda, current); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex i) const override { exchange_device(i); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return exchange_device(i); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchange_device(i); }
  bool isPinnedPtr(const void* p) const override { return PinnedAllocator::holds(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(c10::DeviceIndex) const override { tell("wait", "cuda.synchronize", 0); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", FakeHooks);

// torch's DDP asks for one and does not take none
struct FakeTimer final : c10d::Timer {
  explicit FakeTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional(*to - *from) : std::nullopt;
  }
};
using c10d::RegistererTimerRegistry;
using c10d::TimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, kCuda, FakeTimer);

// What the host waits for: the size of the result depends on values, or a value is read
const std::unordered_set<std::string> waits = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor", "aten::bincount",
    "aten::is_nonzero", "aten::multinomial", "aten::_unique"};
// What takes tensors of several devices
const std::unordered_set<std::string> mixes = {
    "aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_",
    "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put",
    "aten::_copy_from_and_resize", "aten::set_.source_Tensor", "aten::_pin_memory"};

// ------------------------------------------------------------------ CUDA tensor <-> CPU tensor of the same memory
struct Aliases {
  struct One { c10::intrusive_ptr<c10::StorageImpl> cuda, cpu; void* data; size_t nbytes; };
  std::vector<One> storages;
  std::vector<std::pair<Tensor, Tensor>> tensors;  // cuda, cpu
  Device device{kCuda, 0};

  c10::intrusive_ptr<c10::StorageImpl> storage(const Tensor& t) { return storage_of(t.storage()); }
  c10::intrusive_ptr<c10::StorageImpl> storage_of(const c10::Storage& st) {
    auto own = st.getWeakStorageImpl().lock();
    for (auto& s : storages) if (s.cuda.get() == own.get()) return s.cpu;
    auto* hold = new c10::intrusive_ptr<c10::StorageImpl>(own);
    void* p = own->mutable_data();
    c10::DataPtr ptr(p, hold, [](void* h) { delete static_cast<c10::intrusive_ptr<c10::StorageImpl>*>(h); }, Device(DeviceType::CPU));
    auto cpu = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), own->nbytes(), std::move(ptr), c10::GetCPUAllocator(), true);
    storages.push_back({own, cpu, p, own->nbytes()});
    return cpu;
  }
  Tensor to_cpu(const Tensor& t) {
    if (!t.defined()) return t;
    for (auto& [a, b] : tensors) if (a.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return b;
    TORCH_CHECK(t.layout() == c10::kStrided, "fakecuda: layout ", t.layout());
    auto r = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage(t)), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    auto* impl = r.unsafeGetTensorImpl();
    impl->set_storage_offset(t.storage_offset());
    impl->set_sizes_and_strides(t.sizes(), t.strides());
    if (t.is_conj()) r._set_conj(true);
    if (t.is_neg()) r._set_neg(true);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    tensors.emplace_back(t, r);
    return r;
  }
  bool knows(const Tensor& r) {
    for (auto& [a, b] : tensors) if (b.unsafeGetTensorImpl() == r.unsafeGetTensorImpl()) return true;
    return false;
  }
  // What the CPU's kernel returned, as CUDA's would have
  Tensor to_cuda(const Tensor& r) {
    if (!r.defined()) return r;
    for (auto& [a, b] : tensors) if (b.unsafeGetTensorImpl() == r.unsafeGetTensorImpl()) return a;  // in place
    TORCH_CHECK(r.layout() == c10::kStrided, "fakecuda: result of layout ", r.layout());
    c10::Storage st;
    for (auto& s : storages) if (s.cpu.get() == r.storage().unsafeGetStorageImpl()) st = c10::Storage(s.cuda);  // a view
    if (!st) {
      auto* hold = new c10::Storage(r.storage());
      c10::DataPtr ptr(r.storage().mutable_data(), hold, [](void* h) { delete static_cast<c10::Storage*>(h); }, device);
      st = c10::Storage(c10::Storage::use_byte_size_t(), r.storage().nbytes(), std::move(ptr), &allocator, true);
    }
    auto t = made(std::move(st), r);
    t.unsafeGetTensorImpl()->set_storage_offset(r.storage_offset());
    t.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes(), r.strides());
    if (r.is_conj()) t._set_conj(true);
    if (r.is_neg()) t._set_neg(true);
    return t;
  }
  // A view is an inference tensor where its base is one, all else where the mode is on.
  Tensor made(c10::Storage st, const Tensor& r) {
    c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
    for (auto& [a, b] : tensors) {
      if (b.storage().unsafeGetStorageImpl() != r.storage().unsafeGetStorageImpl()) continue;
      auto inherited = c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) |
          c10::autocast_dispatch_keyset;
      keys = keys | (a.key_set() & inherited);
      return at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(st), keys, r.dtype());
    }
    return at::detail::make_tensor<c10::TensorImpl>(std::move(st), keys, r.dtype());
  }
  // Sizes and memory that the kernel changed in place
  void write_back() {
    for (auto& s : storages) {
      if (s.cpu->mutable_data() != s.data || s.cpu->nbytes() != s.nbytes) {
        auto* hold = new c10::intrusive_ptr<c10::StorageImpl>(s.cpu);
        s.cuda->set_data_ptr_noswap(c10::DataPtr(s.cpu->mutable_data(), hold, [](void* h) { delete static_cast<c10::intrusive_ptr<c10::StorageImpl>*>(h); }, device));
        s.cuda->set_nbytes(s.cpu->nbytes());
      }
    }
    for (auto& [a, b] : tensors) {
      bool moved = true;
      for (auto& s : storages) if (s.cpu.get() == b.storage().unsafeGetStorageImpl()) {
        moved = false;
        if (s.cuda.get() != a.storage().unsafeGetStorageImpl()) a.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(s.cuda));
      }
      if (moved) a.unsafeGetTensorImpl()->set_storage_keep_dtype(to_cuda(b.alias()).storage());
      if (a.sizes() != b.sizes() || a.strides() != b.strides() || a.storage_offset() != b.storage_offset()) {
        a.unsafeGetTensorImpl()->set_storage_offset(b.storage_offset());
        a.unsafeGetTensorImpl()->set_sizes_and_strides(b.sizes(), b.strides());
      }
    }
  }
};

// ------------------------------------------------------------------ a call of any operator
struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  const c10::FunctionSchema& schema = op.schema();
  const std::string name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  const bool may_mix = mixes.count(name) > 0;
  Aliases aliases{};
  std::optional<Device> asked{}, met{};
  std::optional<at::Generator> generator{};
  std::string cpu_shape{};
  int64_t bytes = 0;
  int cpu_tensors = 0;
  bool cpu_written = false, non_blocking = false;

  IValue& argument(size_t i) { return (*stack)[begin + i]; }

  void see(const Tensor& t, bool written) {
    if (!t.defined()) return;
    bytes = std::max<int64_t>(bytes, t.numel() * t.element_size());
    if (t.is_cuda()) {
      if (met && *met != t.device() && !may_mix) refuse(c10::str(t.device()));
      met = t.device();
    } else if (t.device().is_cpu() && (t.dim() > 0 || written)) {  // a number may lie on the CPU
      cpu_tensors++;
      cpu_shape = c10::str(t.sizes());
      cpu_written |= written;
    }
  }
  void refuse(const std::string& other) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *met, " and ",
                other, "! (fake CUDA, ", name, ")");
  }
  void look() {
    for (size_t i = 0; i < count; i++) {
      const auto& v = argument(i);
      const auto& declared = schema.arguments()[i];
      const bool written = declared.alias_info() && declared.alias_info()->isWrite();
      if (v.isTensor()) see(v.toTensor(), written);
      else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) see(t, written);
      else if (v.isOptionalTensorList()) for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) { if (t) see(*t, written); }
      else if (v.isDevice()) asked = v.toDevice();
      else if (declared.name() == "non_blocking" && v.isBool()) non_blocking = v.toBool();
    }
    aliases.device = met ? *met : Device(kCuda, current);
    if (asked && asked->is_cuda()) aliases.device = Device(kCuda, index_of(*asked));
    if (met && cpu_tensors && !may_mix) refuse("cpu, whose tensor has shape " + cpu_shape);
  }
  void tell_waits() {
    if (waits.count(name) && met) tell("wait", name, bytes);
    if (name == "aten::copy_") {
      auto to = argument(0).toTensor(), from = argument(1).toTensor();
      // Of a copy that the host need not wait for, its side must be pinned.
      const bool waited = !non_blocking || !PinnedAllocator::holds((to.is_cuda() ? from : to).storage().data());
      if (to.is_cuda() != from.is_cuda())
        tell(from.is_cuda() ? (waited ? "d2h" : "d2h non_blocking") : (waited ? "h2d" : "h2d non_blocking"), name, bytes);
    }
    if (name != "aten::index.Tensor" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return;
    for (size_t i = 0; i < count; i++) {
      if (!argument(i).isOptionalTensorList()) continue;
      for (const std::optional<Tensor>& t : argument(i).toOptionalTensorVector()) {
        if (!t || !t->defined()) continue;
        if (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte) tell("wait", name + " with a mask", bytes);
        else if (t->device().is_cpu() && met && t->dim()) tell("h2d", name + " with a CPU index", t->numel() * 8);
      }
    }
  }
  Tensor cpu(const Tensor& t) { return t.defined() && t.is_cuda() ? aliases.to_cpu(t) : t; }
  void to_cpu() {
    for (size_t i = 0; i < count; i++) {
      auto& v = argument(i);
      if (v.isTensor()) v = cpu(v.toTensor());
      else if (v.isTensorList()) {
        std::vector<Tensor> all;
        for (auto& t : v.toTensorVector()) all.push_back(cpu(t));
        v = IValue(all);
      } else if (v.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> all;
        for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) all.push_back(t ? std::optional<Tensor>(cpu(*t)) : t);
        v = IValue(all);
      } else if (v.isDevice() && v.toDevice().is_cuda()) v = IValue(Device(DeviceType::CPU));
      else if (v.isGenerator() && v.toGenerator().device().is_cuda()) {
        generator = v.toGenerator();
        v = IValue();
      } else if (v.isStorage() && v.toStorage().device().is_cuda()) v = IValue(c10::Storage(aliases.storage_of(v.toStorage())));
      else if (schema.arguments()[i].name() == "pin_memory" && met) v = IValue();
    }
  }
  void compute() {
    c10::impl::ExcludeDispatchKeyGuard below(
        c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) | c10::autocast_dispatch_keyset);
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || !op.hasTag(at::Tag::nondeterministic_seeded))
      return op.callBoxed(stack);
    // The CPU's generator draws from where the fake one stands, and is put back.
    auto g = generator ? *generator : generators()[aliases.device.index()];
    auto* fake = static_cast<FakeGenerator*>(g.unsafeGetGeneratorImpl());
    auto plain = at::detail::getDefaultCPUGenerator();
    auto state = plain.get_state();
    plain.set_current_seed((fake->seed_ * 6364136223846793005ull + 1442695040888963407ull) ^ (fake->offset_ * 0x9E3779B97F4A7C15ull));
    fake->offset_ += 4;
    try {
      op.callBoxed(stack);
    } catch (...) {
      plain.set_state(state);
      throw;
    }
    plain.set_state(state);
  }
  void to_cuda() {
    aliases.write_back();
    if (asked && asked->is_cpu()) return;
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
      auto& v = (*stack)[i];
      if (v.isTensor() && v.toTensor().defined() && v.toTensor().device().is_cpu() && (met || !cpu_written)) {
        // copy_ into a CPU tensor returns that very tensor
        if (name != "aten::copy_" || aliases.knows(v.toTensor())) v = aliases.to_cuda(v.toTensor());
      } else if (v.isTensorList()) {
        std::vector<Tensor> all;
        for (auto& t : v.toTensorVector()) all.push_back(aliases.to_cuda(t));
        v = IValue(all);
      }
    }
  }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call call{op, stack};
  call.look();
  call.tell_waits();
  call.to_cpu();
  call.compute();
  call.to_cuda();
}

using Optional = std::optional<Tensor>;
Tensor sdpa(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask, double p, bool causal, std::optional<double> scale, bool gqa) {
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, mask, p, causal, std::nullopt, scale, gqa));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (auto name : {"copy_", "resize_", "_local_scalar_dense", "set_.source_Storage_storage_offset", "set_.source_Storage",
                    "set_.source_Tensor", "set_",
                    // on CUDA they choose kernels that a CPU lacks
                    "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("scaled_dot_product_attention", &sdpa);
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
  m.impl("is_pinned", [](const Tensor&, std::optional<Device>) { return false; });
  m.impl("_pin_memory", [](const Tensor& t, std::optional<Device>) { return t; });
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", &sdpa); }

void resize_storage(c10::Storage storage, size_t size) {
  auto* impl = storage.unsafeGetStorageImpl();
  auto fresh = allocator.allocate(size);
  if (size && impl->nbytes()) std::memcpy(fresh.get(), impl->data(), std::min(size, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(size);
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_device", [](int i) { current = (c10::DeviceIndex)i; });
  m.def("get_device", [] { return (int)current; });
  m.def("exchange_device", [](int i) { return (int)exchange_device((c10::DeviceIndex)i); });
  m.def("device_count", &device_count);
  m.def("get_stream", [](int i) { return streams.at(i); });
  m.def("set_stream", [](int i, int64_t id) { streams.at(i) = id; });
  m.def("generator", [](int i) { return generators().at(i); });
  m.def("alias", [](const Tensor& t) { return Aliases().to_cpu(t); });
  m.def("resize_storage", &resize_storage);
  m.def("listen", [](py::object f) {
    Py_XDECREF(listener);
    listener = f.is_none() ? nullptr : f.inc_ref().ptr();
  });
}
