// A device for PyTorch whose memory is the host's: what runs on it takes the ways of an accelerator.
//
// Tensors of the device `sim` have a dispatch key, a generator, streams, memory statistics and a communication backend of
// their own. Each operation runs on the CPU, on tensors that share the memory (`run_on_cpu`). As on a real accelerator, an
// operation that gets tensors of two devices is an error, so that a tensor which was made on the CPU by mistake is seen.
//
// What it cannot show: that work is queued. Each operation has ended when it returns.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kMostDevices = 16;

DeviceIndex device_count() {
  const char* asked = std::getenv("SIMULATED_DEVICES");
  const int count = asked == nullptr ? 1 : std::atoi(asked);
  return static_cast<DeviceIndex>(std::min<int>(std::max(count, 0), kMostDevices));
}

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kMostDevices] = {};

DeviceIndex index_of(Device device) {
  return device.has_index() ? device.index() : current_device;
}

// -- memory -----------------------------------------------------------------------------------------------------------

struct Usage {
  int64_t bytes = 0, peak = 0;
};

std::mutex usage_mutex;
Usage usage[kMostDevices];

void count_bytes(DeviceIndex device, int64_t bytes) {
  const std::lock_guard<std::mutex> guard(usage_mutex);
  usage[device].bytes += bytes;
  usage[device].peak = std::max(usage[device].peak, usage[device].bytes);
}

// Memory of the host that counts as the device's until it is freed.
struct Block {
  c10::DataPtr memory;
  c10::Storage storage;  // in place of `memory`, where an operation of the CPU has made it
  DeviceIndex device;
  int64_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  count_bytes(block->device, -block->bytes);
  delete block;
}

c10::DataPtr as_device_memory(Block* block, void* data) {
  count_bytes(block->device, block->bytes);
  return {data, block, &free_block, Device(kSim, block->device)};
}

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{c10::GetAllocator(c10::kCPU)->allocate(bytes), {}, current_device, static_cast<int64_t>(bytes)};
    return as_device_memory(block, block->memory.get());
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  void resetAccumulatedStats(DeviceIndex) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const std::lock_guard<std::mutex> guard(usage_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& all = (*array)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = usage[device].bytes;
      all.peak = usage[device].peak;
    }
    return stats;
  }

  void resetPeakStats(DeviceIndex device) override {
    const std::lock_guard<std::mutex> guard(usage_mutex);
    usage[device].peak = usage[device].bytes;
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    constexpr size_t total = size_t{8} << 30;
    const std::lock_guard<std::mutex> guard(usage_mutex);
    return {total - std::min<size_t>(total, usage[device].bytes), total};
  }
};

SimAllocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const DeviceIndex before = std::exchange(current_device, index_of(storage->device()));
  c10::DataPtr memory = allocator.allocate(bytes);
  current_device = before;
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0) {
    std::memcpy(memory.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

// Page-locked memory: the host's, of which is known that it was asked for as such.
std::mutex pinned_mutex;
std::unordered_set<const void*> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetAllocator(c10::kCPU)->allocate(bytes));
    const std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned.insert(memory->get());
    return {memory->get(), memory, &free_pinned, Device(c10::kCPU)};
  }

  static void free_pinned(void* context) {
    auto* memory = static_cast<c10::DataPtr*>(context);
    {
      const std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned.erase(memory->get());
    }
    delete memory;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedAllocator pinned_allocator;

// -- devices, streams, events, random numbers ---------------------------------------------------------------------------

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  Device exchangeDevice(Device device) const override {
    return {kSim, std::exchange(current_device, index_of(device))};
  }
  Device getDevice() const override {
    return {kSim, current_device};
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(index_of(device) < device_count(), "there is no device ", device);
    current_device = index_of(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = index_of(device);
  }
  Stream getStream(Device device) const noexcept override {
    const DeviceIndex index = index_of(device);
    return Stream(Stream::UNSAFE, Device(kSim, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kSim, index_of(device)));
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> latest{0};
    return Stream(Stream::UNSAFE, Device(kSim, index_of(device)), ++latest);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    const DeviceIndex index = index_of(stream.device());
    return Stream(Stream::UNSAFE, Device(kSim, index), std::exchange(current_streams[index], stream.id()));
  }
  void* getStreamNativeHandle(const Stream) const override {
    return nullptr;
  }
  DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}

  // An event is the moment at which it was recorded.
  using Moment = std::chrono::steady_clock::time_point;
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Moment();
    }
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* begun, void* ended, const DeviceIndex) const override {
    const auto passed = *static_cast<Moment*>(ended) - *static_cast<Moment*>(begun);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(DeviceIndex device)
      : SimGenerator(device, at::detail::createCPUGenerator()) {}
  SimGenerator(DeviceIndex device, at::Generator host)
      : GeneratorImpl(Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "a generator of `sim` has no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "a generator of `sim` has no offset");
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override {
    return new SimGenerator(device().index(), host.clone());
  }

  at::Generator host;  // draws on the CPU
};

at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex index = 0; index < kMostDevices; ++index) {
      made.push_back(at::make_generator<SimGenerator>(index));
      made.back().set_current_seed(c10::default_rng_seed_val);
    }
    return made;
  }();
  return generators.at(device);
}

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(DeviceIndex device) const override {
    SimGuard().setDevice(Device(kSim, device));
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard<std::mutex> guard(pinned_mutex);
    return pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<SimGenerator>(device < 0 ? current_device : device);
  }
  Device getDeviceFromPtr(void*) const override {
    return {kSim, current_device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

// -- operations -------------------------------------------------------------------------------------------------------

void free_storage_reference(void* context) {
  delete static_cast<c10::Storage*>(context);
}

// A storage of the CPU over a device's memory, which it keeps alive.
c10::Storage host_storage(const c10::Storage& storage) {
  auto* owner = new c10::Storage(storage);
  c10::DataPtr memory(owner->mutable_data(), owner, &free_storage_reference, Device(c10::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetAllocator(c10::kCPU), true);
}

at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

at::Tensor host_tensor(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  // Whether a tensor was made in inference mode is a property of the tensor, and a view has it from its base.
  const c10::InferenceMode mode(tensor.is_inference());
  return tensor_over(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
}

std::vector<at::Tensor> host_tensors(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> hosts;
  for (const auto& tensor : tensors) {
    hosts.push_back(host_tensor(tensor));
  }
  return hosts;
}

// One call of an operation: what stands on the CPU for each tensor of the device.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void run(torch::jit::Stack* stack) {
    const auto& schema = op_.schema();
    const size_t begin = stack->size() - schema.arguments().size();
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      find_device((*stack)[begin + i]);
    }
    TORCH_INTERNAL_ASSERT(device_, op_.operator_name(), " has no argument on the device");
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      (*stack)[begin + i] = host_argument((*stack)[begin + i], schema.arguments()[i]);
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (auto& pair : pairs_) {
      take_changes(pair);
    }
    const size_t first = stack->size() - schema.returns().size();
    for (size_t i = first; i < stack->size(); ++i) {
      (*stack)[i] = device_value((*stack)[i]);
    }
  }

 private:
  struct Pair {
    at::Tensor device, host;
    void* memory;  // of the storage before the call
  };

  void find_device(const c10::IValue& value) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (tensor.defined() && tensor.is_privateuseone()) {
        TORCH_CHECK(!device_ || *device_ == tensor.device() || tensor.dim() == 0,
            op_.operator_name(), ": tensors are on ", *device_, " and on ", tensor.device());
        device_ = tensor.device();
      }
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        find_device(c10::IValue(tensor));
      }
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        find_device(item);
      }
    } else if (value.isDevice() && value.toDevice().type() == kSim && !device_) {
      device_ = Device(kSim, index_of(value.toDevice()));
    }
  }

  c10::IValue host_argument(const c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      return host_of(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        hosts.push_back(host_of(tensor));
      }
      return hosts;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        hosts.push_back(tensor ? std::optional<at::Tensor>(host_of(*tensor)) : std::nullopt);
      }
      return hosts;
    }
    if (value.isDevice()) {
      return Device(c10::kCPU);
    }
    if (value.isGenerator()) {
      const auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == kSim, op_.operator_name(), ": the generator is on ", generator.device());
      return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->host;
    }
    const bool takes_generator = argument.type()->str().find("Generator") != std::string::npos;
    if (value.isNone() && takes_generator) {
      auto* generator = default_generator(device_->index()).unsafeGetGeneratorImpl();
      return static_cast<SimGenerator*>(generator)->host;
    }
    return value;
  }

  at::Tensor host_of(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!tensor.is_privateuseone()) {
      // As on CUDA: a number may lie on the CPU, and so may the positions of an index.
      const bool is_index = op_.schema().name().find("index") != std::string::npos;
      TORCH_CHECK(tensor.dim() == 0 || is_index, op_.operator_name(), ": expected all tensors to be on the same device, ",
          "but found at least two devices, ", *device_, " and ", tensor.device());
      return tensor;
    }
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto known = storages_.find(key);
    if (known == storages_.end()) {
      known = storages_.emplace(key, host_storage(tensor.storage())).first;
    }
    const c10::InferenceMode mode(tensor.is_inference());
    at::Tensor host = tensor_over(known->second, c10::DispatchKey::CPU, tensor);
    pairs_.push_back({tensor, host, host.storage().mutable_data()});
    return host;
  }

  // An operation may have resized or reshaped a tensor that it was given.
  void take_changes(Pair& pair) {
    auto* impl = pair.device.unsafeGetTensorImpl();
    if (pair.host.storage().data() != pair.memory) {
      auto* storage = pair.device.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(device_memory(pair.host.storage()));
      storage->set_nbytes(pair.host.storage().nbytes());
    }
    if (pair.host.sizes() != pair.device.sizes() || pair.host.strides() != pair.device.strides() ||
        pair.host.storage_offset() != pair.device.storage_offset()) {
      impl->set_sizes_and_strides(pair.host.sizes(), pair.host.strides(), pair.host.storage_offset());
    }
  }

  c10::IValue device_value(const c10::IValue& value) {
    if (value.isTensor()) {
      return device_tensor(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(device_tensor(tensor));
      }
      return tensors;
    }
    return value;
  }

  at::Tensor device_tensor(const at::Tensor& host) {
    if (!host.defined()) {
      return host;
    }
    for (const auto& pair : pairs_) {
      if (pair.host.is_same(host)) {
        return pair.device;
      }
    }
    for (const auto& pair : pairs_) {
      if (pair.host.storage().is_alias_of(host.storage())) {  // a view
        const c10::InferenceMode mode(pair.device.is_inference());
        return tensor_over(pair.device.storage(), c10::DispatchKey::PrivateUse1, host);
      }
    }
    const c10::Storage storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(), device_memory(host.storage()),
        &allocator, true);
    return tensor_over(storage, c10::DispatchKey::PrivateUse1, host);
  }

  c10::DataPtr device_memory(const c10::Storage& host) {
    auto* block = new Block{{}, host, device_->index(), static_cast<int64_t>(host.nbytes())};
    return as_device_memory(block, host.mutable_data());
  }

  const c10::OperatorHandle& op_;
  std::optional<Device> device_;
  std::vector<Pair> pairs_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op).run(stack);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  host_tensor(to).copy_(host_tensor(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const int64_t elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(storage), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// The CPU's form draws from the generator of the CPU.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  const double scale = p == 1 ? 0.0 : 1 / (1 - p);
  return {input * mask * scale, mask};
}

// As between the CPU and CUDA: `parameter.data = tensor` and `module.to(device)` keep the parameter, so that tied ones stay tied.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return dense(self) && dense(from);
}

void record_stream(at::Tensor&, Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

// What `torch.autocast("sim")` does is what it does on CUDA.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define IN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define IN_FLOAT32_UNLESS_ASKED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_THE_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(IN_LOWER_PRECISION)
  AT_FORALL_FP32(IN_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(IN_FLOAT32_UNLESS_ASKED)
  AT_FORALL_PROMOTE(IN_THE_WIDEST)
}

// -- communication ------------------------------------------------------------------------------------------------------

// Work of gloo on the memory of tensors of the device.
struct SimWork final : c10d::Work {
  SimWork(c10::intrusive_ptr<c10d::Work> inner, std::vector<at::Tensor> outputs)
      : inner(std::move(inner)), outputs(std::move(outputs)) {}

  bool isCompleted() override {
    return inner->isCompleted();
  }
  bool isSuccess() const override {
    return inner->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner->exception();
  }
  int sourceRank() const override {
    return inner->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    return outputs;
  }
  void synchronize() override {
    inner->wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return inner->wait(timeout);
  }
  void abort() override {
    inner->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    inner->getFuture()->addCallback([future, outputs = outputs](c10::ivalue::Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
      } else {
        future->markCompleted(c10::IValue(outputs));
      }
    });
    return future;
  }

  c10::intrusive_ptr<c10d::Work> inner;
  std::vector<at::Tensor> outputs;
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

struct SimOptions final : c10d::Backend::Options {
  using Options::Options;
};

class SimBackend final : public c10d::Backend {
 public:
  // Makes the backend of fewer ranks: store, rank and size of its group, milliseconds.
  using Create = std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store>, int, int, int64_t)>;

  SimBackend(c10::intrusive_ptr<c10d::Backend> gloo, Create create, int64_t timeout_ms)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        create_(std::move(create)),
        options_(c10::make_intrusive<SimOptions>("simccl", std::chrono::milliseconds(timeout_ms))) {}

  bool supportsSplitting() const override {
    return true;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  c10::intrusive_ptr<SimOptions> options() const {
    return options_;
  }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    const auto found = std::find(ranks.begin(), ranks.end(), getRank());
    if (found == ranks.end()) {
      return nullptr;
    }
    const int rank = static_cast<int>(found - ranks.begin());
    // All groups that are split from one parent get the same store, and would read each other's addresses.
    const auto own_store = c10::make_intrusive<c10d::PrefixStore>("simccl/" + options->group_name, store);
    return create_(own_store, rank, static_cast<int>(ranks.size()), options->timeout.count());
  }

  const std::string getBackendName() const override {
    return "simccl";
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto hosts = host_tensors(tensors);
    return work(gloo_->broadcast(hosts, opts), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto hosts = host_tensors(tensors);
    auto plain = opts;
    plain.reduceOp = plain_sum(opts.reduceOp);
    return divided(gloo_->allreduce(hosts, plain), opts.reduceOp, hosts, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    auto hosts = host_tensors(tensors);
    auto plain = opts;
    plain.reduceOp = plain_sum(opts.reduceOp);
    return divided(gloo_->allreduce_coalesced(hosts, plain), opts.reduceOp, hosts, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto hosts = host_tensors(tensors);
    auto plain = opts;
    plain.reduceOp = plain_sum(opts.reduceOp);
    return divided(gloo_->reduce(hosts, plain), opts.reduceOp, hosts, tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto host_outputs = lists(outputs);
    auto hosts = host_tensors(inputs);
    return work(gloo_->allgather(host_outputs, hosts, opts), outputs.at(0));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto host_output = host_tensor(output);
    auto host_input = host_tensor(input);
    return work(gloo_->_allgather_base(host_output, host_input, opts), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto host_outputs = host_tensors(outputs);
    auto hosts = host_tensors(inputs);
    return work(gloo_->allgather_into_tensor_coalesced(host_outputs, hosts, opts), outputs);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto host_outputs = lists(outputs);
    auto hosts = host_tensors(inputs);
    return work(gloo_->gather(host_outputs, hosts, opts), outputs.empty() ? Tensors{} : outputs.at(0));
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto host_outputs = host_tensors(outputs);
    auto host_inputs = lists(inputs);
    return work(gloo_->scatter(host_outputs, host_inputs, opts), outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto host_outputs = host_tensors(outputs);
    auto host_inputs = lists(inputs);
    auto plain = opts;
    plain.reduceOp = plain_sum(opts.reduceOp);
    return divided(gloo_->reduce_scatter(host_outputs, host_inputs, plain), opts.reduceOp, host_outputs, outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    auto host_output = host_tensor(output);
    auto host_input = host_tensor(input);
    auto plain = opts;
    plain.reduceOp = plain_sum(opts.reduceOp);
    return divided(gloo_->_reduce_scatter_base(host_output, host_input, plain), opts.reduceOp, {host_output}, {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto host_outputs = host_tensors(outputs);
    auto hosts = host_tensors(inputs);
    auto plain = opts;
    plain.reduceOp = plain_sum(opts.reduceOp);
    return divided(gloo_->reduce_scatter_tensor_coalesced(host_outputs, hosts, plain), opts.reduceOp, host_outputs, outputs);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) override {
    auto host_output = host_tensor(output);
    auto host_input = host_tensor(input);
    return work(gloo_->alltoall_base(host_output, host_input, output_sizes, input_sizes, opts), {output});
  }
  // gloo has no form for lists of tensors. Every rank sends to every other, as NCCL does.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    auto host_outputs = host_tensors(outputs);
    auto hosts = host_tensors(inputs);
    std::vector<WorkPtr> works;
    for (int peer = 0; peer < getSize(); ++peer) {
      if (peer == getRank()) {
        host_outputs[peer].copy_(hosts[peer]);
        continue;
      }
      Tensors to{hosts[peer].contiguous()}, from{host_outputs[peer]};
      works.push_back(gloo_->send(to, peer, 7321));
      works.push_back(gloo_->recv(from, peer, 7321));
    }
    for (auto& one : works) {
      one->wait(kNoTimeout);
    }
    Tensors none{at::zeros({1})};
    return work(gloo_->allreduce(none, {}), outputs);
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    auto hosts = host_tensors(tensors);
    return work(gloo_->send(hosts, peer, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    auto hosts = host_tensors(tensors);
    return work(gloo_->recv(hosts, peer, tag), tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto hosts = host_tensors(tensors);
    return work(gloo_->recvAnysource(hosts, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return gloo_->barrier({});
  }

 private:
  static std::vector<Tensors> lists(const std::vector<Tensors>& all) {
    std::vector<Tensors> hosts;
    for (const auto& tensors : all) {
      hosts.push_back(host_tensors(tensors));
    }
    return hosts;
  }
  static WorkPtr work(WorkPtr inner, const Tensors& outputs) {
    return c10::make_intrusive<SimWork>(std::move(inner), outputs);
  }

  // NCCL has a mean, and gloo has none.
  static c10d::ReduceOp plain_sum(const c10d::ReduceOp& op) {
    return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }
  WorkPtr divided(WorkPtr inner, const c10d::ReduceOp& op, const Tensors& hosts, const Tensors& outputs) {
    if (op == c10d::ReduceOp::AVG) {
      inner->wait(kNoTimeout);
      for (auto host : hosts) {
        host.div_(getSize());
      }
      // gloo's work copies its sum into the output at each wait, so it must not be waited for again.
      auto ended = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      ended->markCompleted(c10::IValue(outputs));
      return c10d::Work::create_from_future(ended);
    }
    return work(std::move(inner), outputs);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  Create create_;
  c10::intrusive_ptr<SimOptions> options_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static SimHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  py::class_<SimOptions, c10d::Backend::Options, c10::intrusive_ptr<SimOptions>>(m, "Options")
      .def("__deepcopy__", [](const SimOptions& self, const py::dict&) { return c10::make_intrusive<SimOptions>(self); });
  py::class_<SimBackend, c10d::Backend, c10::intrusive_ptr<SimBackend>>(m, "SimBackend")
      .def_property_readonly("options", &SimBackend::options);
  m.def("over_gloo",
      [](c10::intrusive_ptr<c10d::Backend> gloo, py::function create, int64_t timeout_ms) -> c10::intrusive_ptr<c10d::Backend> {
        // Held for as long as the process lives: a group may end on a thread without Python.
        auto* held = new py::function(std::move(create));
        auto split = [held](c10::intrusive_ptr<c10d::Store> store, int rank, int size, int64_t milliseconds) {
          const py::gil_scoped_acquire gil;
          return (*held)(store, rank, size, milliseconds).cast<c10::intrusive_ptr<c10d::Backend>>();
        };
        return c10::make_intrusive<SimBackend>(std::move(gloo), split, timeout_ms);
      });
  m.def("default_generator", [](int64_t device) { return default_generator(static_cast<DeviceIndex>(device)); });
  m.def("device_count", [] { return static_cast<int64_t>(device_count()); });
}
