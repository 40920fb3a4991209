// A device for tests that computes on the CPU and mixes with it no more than a GPU would.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto made = c10::GetCPUAllocator()->allocate(bytes);
    auto* data = made.get();
    auto* context = made.release_context();
    return {data, context, made.get_deleter(), c10::Device(kind, 0)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
Memory memory;
REGISTER_ALLOCATOR(kind, &memory)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return {kind, 0}; }
  c10::Device getDevice() const override { return {kind, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, {kind, 0}); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, {kind, 0}); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Random numbers: those of a CPU generator inside.
struct Draws final : at::CPUGeneratorImpl {
  explicit Draws(c10::DeviceIndex index) : at::CPUGeneratorImpl(), inner(at::detail::createCPUGenerator()) {
    device_ = c10::Device(kind, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    auto held = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state));
    inner.set_state(at::Tensor(held));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.get_state().getIntrusivePtr(); }
  at::Generator inner;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator one = at::make_generator<Draws>(0);
    return one;
  }
  at::Generator getNewGenerator(c10::DeviceIndex index = -1) const override {
    return at::make_generator<Draws>(index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto made = memory.allocate(bytes);
    std::memcpy(made.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr(std::move(made));
    storage.set_nbytes(bytes);
  }
};

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic_symint(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_symint_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

bool here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kind; }

// The same bytes as a tensor of the CPU, which keeps the storage alive.
at::Tensor on_cpu(const at::Tensor& tensor) {
  auto storage = tensor.storage();
  auto data = c10::DataPtr(storage.mutable_data(), new c10::Storage(storage),
      [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::Device(c10::kCPU));
  auto shared = c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  seen.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) seen._set_conj(true);
  if (tensor.is_neg()) seen._set_neg(true);
  return seen;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  auto from = here(source) ? on_cpu(source) : source;
  auto to = here(target) ? on_cpu(target) : target;
  const bool possible = from.device().is_cpu() && to.device().is_cpu();
  TORCH_CHECK(possible, "no copy between ", source.device(), " and ", target.device());
  to.copy_(from);
  return target;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Scalar item(const at::Tensor& self) { return on_cpu(self).item(); }

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  auto added = bias.has_value() && bias->defined() ? std::optional<at::Tensor>(on_cpu(*bias)) : std::nullopt;
  auto found = at::convolution(
      on_cpu(input), on_cpu(weight), added, stride, padding, dilation, transposed, output_padding, groups);
  return found.to(input.device());
}

at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return at::histc(on_cpu(self).to(at::kDouble), bins, low, high).to(self.options());
}

// Every other operation runs on the CPU, on the same bytes.
void anything(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  auto arguments = torch::jit::last(*stack, count);
  std::vector<std::pair<at::Tensor, at::Tensor>> known;  // ours, as a tensor of the CPU
  const bool indexes = schema.name().rfind("aten::index", 0) == 0 || schema.name().rfind("aten::_index", 0) == 0 ||
      schema.name().rfind("aten::_unsafe_index", 0) == 0;
  std::string stranger;
  bool any = false;
  auto moved = [&](const at::Tensor& given, bool may_be_index) -> at::Tensor {
    if (!given.defined()) return given;
    if (!here(given)) {
      if (given.dim() > 0 && !(indexes && may_be_index)) {
        stranger = c10::str(given.device(), " of shape ", given.sizes());
      }
      return given;
    }
    any = true;
    for (auto& [ours, theirs] : known) if (ours.is_same(given)) return theirs;
    known.emplace_back(given, on_cpu(given));
    return known.back().second;
  };
  for (size_t at = 0; at < count; ++at) {
    auto value = arguments[at];
    auto& place = (*stack)[stack->size() - count + at];
    if (value.isTensor()) place = moved(value.toTensor(), false);
    else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& each : value.toTensorVector()) list.push_back(moved(each, false));
      place = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector()) {
        list.push_back(each.has_value() ? std::optional<at::Tensor>(moved(*each, true)) : std::nullopt);
      }
      place = list;
    } else if (value.isGenerator() && value.toGenerator().device().type() == kind) {
      place = value.toGenerator().get<Draws>()->inner;
    } else if (value.isGenerator() && value.toGenerator().defined()) {
      stranger = "a generator of the CPU";
    } else if (value.isDevice() && value.toDevice().type() == kind) {
      any = true;
      place = c10::Device(c10::kCPU);
    }
  }
  TORCH_CHECK(stranger.empty() || !any, "Expected all tensors to be on the same device: ", schema.name(),
      " was given tensors of the second device, and ", stranger);
  op.callBoxed(stack);
  for (auto& [ours, theirs] : known) {  // what an operation resized, as it does with what it is to write to
    if (theirs.storage().data() != ours.storage().data()) {
      auto made = memory.allocate(theirs.storage().nbytes());
      std::memcpy(made.get(), theirs.storage().data(), theirs.storage().nbytes());
      ours.storage().set_data_ptr(std::move(made));
      ours.storage().set_nbytes(theirs.storage().nbytes());
    }
    if (theirs.sizes() != ours.sizes() || theirs.strides() != ours.strides()) {
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }
  auto returned = [&](const at::Tensor& given) -> at::Tensor {
    if (!given.defined() || !given.device().is_cpu()) return given;
    for (auto& [ours, theirs] : known) if (theirs.is_same(given)) return ours;
    for (auto& [ours, theirs] : known) {
      if (given.has_storage() && given.storage().is_alias_of(theirs.storage())) {  // a view
        auto seen = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), given.dtype());
        seen.unsafeGetTensorImpl()->set_sizes_and_strides(given.sizes(), given.strides(), given.storage_offset());
        return seen;
      }
    }
    if (!any) return given;
    auto made = at::empty_strided(given.sizes(), given.strides(), given.options().device(c10::Device(kind, 0)));
    on_cpu(made).copy_(given);
    return made;
  };
  const auto results = schema.returns().size();
  for (size_t at = 0; at < results; ++at) {
    auto& place = (*stack)[stack->size() - results + at];
    if (place.isTensor()) place = returned(place.toTensor());
    else if (place.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& each : place.toTensorVector()) list.push_back(returned(each));
      place = list;
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_local_scalar_dense", item);
  m.impl("convolution_overrideable", convolution);  // the forward alone
  m.impl("histc", histc);  // of whole numbers, too, as CUDA's
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&anything>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
