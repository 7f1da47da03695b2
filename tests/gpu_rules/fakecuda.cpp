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
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <atomic>
#include <unordered_map>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::IValue;
constexpr auto kC = DeviceType::CUDA;

int device_count() {
  static int n = [] { auto e = std::getenv("FAKECUDA_DEVICES"); return e ? atoi(e) : 4; }();
  return n;
}
thread_local c10::DeviceIndex current = 0;
std::atomic<int> first_device{0};

// ------------------------------------------------------------------ memory
struct FakeAllocator final : c10::Allocator {
  static void release(void* p) { std::free(p); }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? std::aligned_alloc(512, (n + 511) / 512 * 512) : nullptr;
    return {p, p, &release, Device(kC, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* d, const void* s, size_t n) const override { std::memcpy(d, s, n); }
};
FakeAllocator allocator;
REGISTER_ALLOCATOR(kC, &allocator);

// ------------------------------------------------------------------ devices and streams
struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  FakeGuard() = default;
  explicit FakeGuard(DeviceType) {}
  DeviceType type() const override { return kC; }
  Device exchangeDevice(Device d) const override { auto old = current; if (d.index() >= 0) current = d.index(); return Device(kC, old); }
  Device getDevice() const override { return Device(kC, current); }
  void setDevice(Device d) const override { if (d.index() >= 0) current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, Device(kC, d.index() < 0 ? current : d.index())); }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream getNewStream(Device d, int) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)device_count(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);

// ------------------------------------------------------------------ generators: a seed and an offset, as Philox has
struct FakeGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::detail::getNonDeterministicRandom() * 0 + 67280421310721ull, offset_ = 0;
  explicit FakeGenerator(c10::DeviceIndex i) : c10::GeneratorImpl(Device(kC, i), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t s) override { seed_ = s; offset_ = 0; }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom(true)); return seed_; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    std::memcpy(t.data_ptr(), &seed_, 8); std::memcpy((char*)t.data_ptr() + 8, &offset_, 8);
    return t.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& s) override {
    TORCH_CHECK(s.numel() == 16 && s.device().is_cpu(), "RNG state of a fake CUDA generator must be 16 bytes on the CPU");
    std::memcpy(&seed_, s.data(), 8); std::memcpy(&offset_, (const char*)s.data() + 8, 8);
  }
  FakeGenerator* clone_impl() const override { auto g = new FakeGenerator(device().index()); g->seed_ = seed_; g->offset_ = offset_; return g; }
};
std::vector<at::Generator>& generators() {
  static auto* all = [] { auto v = new std::vector<at::Generator>; for (int i = 0; i < device_count(); i++) v->push_back(at::make_generator<FakeGenerator>((c10::DeviceIndex)i)); return v; }();
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
  at::Generator getNewGenerator(c10::DeviceIndex i = -1) const override { return at::make_generator<FakeGenerator>(i < 0 ? current : i); }
  Device getDeviceFromPtr(void*) const override { return Device(kC, current); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex i) const override { current = i; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { auto o = current; if (i >= 0) current = i; return o; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", FakeHooks);

// ------------------------------------------------------------------ what is told to Python
PyObject* listener = nullptr;
std::atomic<long> calls{0};
void tell(const char* what, const std::string& op, int64_t bytes) {
  if (!listener) return;
  py::gil_scoped_acquire gil;
  py::handle h = listener;
  h(what, op, bytes);
}
const std::unordered_set<std::string> waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
  "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor", "aten::bincount", "aten::is_nonzero", "aten::multinomial", "aten::_unique"};
const std::unordered_set<std::string> mixes = {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_",
  "aten::index_put", "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::_copy_from_and_resize", "aten::set_.source_Tensor", "aten::_pin_memory"};

// ------------------------------------------------------------------ CUDA tensor <-> CPU tensor of the same memory
struct Aliases {
  struct One { c10::intrusive_ptr<c10::StorageImpl> cuda, cpu; void* data; size_t nbytes; };
  std::vector<One> storages;
  std::vector<std::pair<Tensor, Tensor>> tensors;  // cuda, cpu
  Device device{kC, 0};

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
    auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(st), c10::DispatchKeySet(c10::DispatchKey::CUDA), r.dtype());
    t.unsafeGetTensorImpl()->set_storage_offset(r.storage_offset());
    t.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes(), r.strides());
    if (r.is_conj()) t._set_conj(true);
    if (r.is_neg()) t._set_neg(true);
    return t;
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

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  calls++;
  const auto& schema = op.schema();
  const std::string name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  const auto n = schema.arguments().size();
  const auto begin = stack->size() - n;
  Aliases al;
  std::optional<Device> asked;
  bool any_cuda = false, cpu_written = false;
  int cpu_tensors = 0;
  int64_t bytes = 0;
  std::optional<Device> met;
  std::string cpu_shape;
  bool non_blocking = false, cpu_source = false, cuda_source = false;
  const bool may_mix = mixes.count(name) > 0;

  auto see = [&](const Tensor& t, bool written) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      any_cuda = true;
      if (met && *met != t.device() && !may_mix) TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *met, " and ", t.device(), "! (fakecuda, ", name, ")");
      met = t.device();
      if (!written) cuda_source = true;
    } else if (t.device().is_cpu()) {
      if (t.dim() > 0 || written) { cpu_tensors++; cpu_shape = c10::str(t.sizes()); if (written) cpu_written = true; }
      if (!written) cpu_source = true;
    }
  };
  for (size_t i = 0; i < n; i++) {
    const auto& v = (*stack)[begin + i];
    const auto& arg = schema.arguments()[i];
    const bool written = arg.alias_info() && arg.alias_info()->isWrite();
    if (v.isTensor()) { see(v.toTensor(), written); if (v.toTensor().defined()) bytes = std::max<int64_t>(bytes, v.toTensor().numel() * v.toTensor().element_size()); }
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) see(t, written);
    else if (v.isOptionalTensorList()) { for (const auto& t : v.toOptionalTensorList()) { std::optional<Tensor> o = t; if (o) see(*o, written); } }
    else if (v.isDevice()) asked = v.toDevice();
    else if (arg.name() == "non_blocking" && v.isBool()) non_blocking = v.toBool();
  }
  if (met) al.device = *met; else al.device = Device(kC, current);
  if (asked && asked->is_cuda()) al.device = Device(kC, asked->index() < 0 ? current : asked->index());
  if (any_cuda && cpu_tensors && !may_mix)
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *met, " and cpu! (fakecuda, ", name, ", the CPU tensor has shape ", cpu_shape, ")");
  // what the host waits for
  if (waits.count(name) && any_cuda) tell("wait", name, bytes);
  if (name == "aten::copy_") {
    auto dst = (*stack)[begin].toTensor(), src = (*stack)[begin + 1].toTensor();
    if (dst.is_cuda() != src.is_cuda()) {
      if (src.is_cuda()) tell(non_blocking ? "d2h non_blocking" : "d2h", name, bytes);
      else tell(non_blocking ? "h2d non_blocking" : "h2d", name, bytes);
    }
  }
  if (name == "aten::index.Tensor" || name == "aten::index_put_" || name == "aten::_index_put_impl_") {
    for (size_t i = 0; i < n; i++) if ((*stack)[begin + i].isOptionalTensorList())
      for (const auto& t : (*stack)[begin + i].toOptionalTensorList()) { std::optional<Tensor> o = t; if (o && o->defined() && (o->scalar_type() == at::kBool || o->scalar_type() == at::kByte)) tell("wait", name + " with a mask", bytes); else if (o && o->defined() && o->device().is_cpu() && any_cuda && o->dim()) tell("h2d", name + " with a CPU index", o->numel() * 8); }
  }
  // the CPU's kernel
  std::optional<at::Generator> generator;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    if (v.isTensor()) { const auto& t = v.toTensor(); if (t.defined() && t.is_cuda()) v = al.to_cpu(t); }
    else if (v.isTensorList()) { auto list = v.toTensorVector(); std::vector<Tensor> out; for (auto& t : list) out.push_back(t.defined() && t.is_cuda() ? al.to_cpu(t) : t); v = IValue(out); }
    else if (v.isOptionalTensorList()) { c10::List<std::optional<Tensor>> out; for (const auto& t : v.toOptionalTensorList()) { std::optional<Tensor> o = t; out.push_back(o && o->defined() && o->is_cuda() ? std::optional<Tensor>(al.to_cpu(*o)) : o); } v = IValue(out); }
    else if (v.isDevice() && v.toDevice().is_cuda()) v = IValue(Device(DeviceType::CPU));
    else if (v.isGenerator() && v.toGenerator().device().is_cuda()) { generator = v.toGenerator(); v = IValue(); }
    else if (v.isStorage() && v.toStorage().device().is_cuda()) v = IValue(c10::Storage(al.storage_of(v.toStorage())));
    else if (schema.arguments()[i].name() == "pin_memory") v = IValue();
  }
  const bool random = op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && op.hasTag(at::Tag::nondeterministic_seeded);
  {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) | c10::autocast_dispatch_keyset);
    if (random) {
      auto g = generator ? *generator : generators()[al.device.index()];
      auto* fake = static_cast<FakeGenerator*>(g.unsafeGetGeneratorImpl());
      auto plain = at::detail::getDefaultCPUGenerator();
      auto state = plain.get_state();
      plain.set_current_seed((fake->seed_ * 6364136223846793005ull + 1442695040888963407ull) ^ (fake->offset_ * 0x9E3779B97F4A7C15ull));
      fake->offset_ += 4;
      try { op.callBoxed(stack); } catch (...) { plain.set_state(state); throw; }
      plain.set_state(state);
    } else {
      op.callBoxed(stack);
    }
  }
  const bool to_host = asked && asked->is_cpu();
  al.write_back();
  const auto outs = schema.returns().size();
  for (size_t i = stack->size() - outs; i < stack->size(); i++) {
    auto& v = (*stack)[i];
    if (to_host) continue;
    if (v.isTensor()) {
      const auto& t = v.toTensor();
      if (t.defined() && t.device().is_cpu() && !(cpu_written && !any_cuda)) {
        // copy_ into a CPU tensor returns that very tensor
        bool own = false;
        if (name == "aten::copy_" && schema.returns().size() == 1) { own = true; for (auto& [a, b] : al.tensors) if (b.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) own = false; }
        if (!own) v = al.to_cuda(t);
      }
    } else if (v.isTensorList()) {
      std::vector<Tensor> out;
      for (auto& t : v.toTensorVector()) out.push_back(al.to_cuda(t));
      v = IValue(out);
    }
  }
}

Tensor sdpa(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double p, bool causal, std::optional<double> scale, bool gqa) {
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, mask, p, causal, std::nullopt, scale, gqa));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (auto name : {"copy_", "resize_", "_local_scalar_dense", "set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor", "set_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("scaled_dot_product_attention", &sdpa);
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
  m.impl("is_pinned", [](const Tensor&, std::optional<Device>) { return false; });
  m.impl("_pin_memory", [](const Tensor& t, std::optional<Device>) { return t; });
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", &sdpa); }
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_device", [](int i) { current = (c10::DeviceIndex)i; });
  m.def("get_device", [] { return (int)current; });
  m.def("exchange_device", [](int i) { int o = current; if (i >= 0) current = (c10::DeviceIndex)i; return o; });
  m.def("device_count", [] { return device_count(); });
  m.def("generator", [](int i) { return generators().at(i); });
  m.def("alias", [](const Tensor& t) { Aliases al; return al.to_cpu(t); });
  m.def("calls", [] { return (long)calls; });
  m.def("listen", [](py::object f) { Py_XDECREF(listener); listener = f.is_none() ? nullptr : f.inc_ref().ptr(); });
}
