// Tensors without contents, views and shapes: what needs no kernel.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/util/strides.h>

namespace vdev {
namespace {

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

void check_plain(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "vdev holds dense tensors only, not ", *layout);
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<c10::MemoryFormat> format) {
  check_plain(layout, pin_memory);
  const c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  check_plain(layout, pin_memory);
  const c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  if (delayed() && self.storage().nbytes() > 0) { // what is kept of it is copied by the host
    finish(current_queue(self.device().index()));
  }
  return at::native::resize_(self, size, format);
}

at::Tensor& set_all(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on ", self.device(),
              " to a storage on different device ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytes(size, stride, self.dtype().itemsize(), size_t(offset));
  TORCH_CHECK(bytes <= source.nbytes(), "a view of ", bytes, " bytes is out of bounds for a storage of ",
              source.nbytes());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride.data() ? stride : c10::IntArrayRef(c10::contiguous_strides(size)));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = int64_t(source.nbytes() / self.dtype().itemsize());
  return set_all(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_all(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, empty({0}, self.scalar_type(), {}, self.device(), {}, {}));
}

void record_stream(at::Tensor& self, at::Stream stream) {
  use_on_stream(self.storage().data_ptr(), queue_of(stream));
}

} // namespace
} // namespace vdev

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", vdev::empty);
  m.impl("empty_strided", vdev::empty_strided);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", vdev::resize);
  m.impl("set_.source_Storage_storage_offset", vdev::set_all);
  m.impl("set_.source_Storage", vdev::set_storage);
  m.impl("set_.source_Tensor", vdev::set_tensor);
  m.impl("set_", vdev::set_nothing);
  m.impl("record_stream", vdev::record_stream);
}
