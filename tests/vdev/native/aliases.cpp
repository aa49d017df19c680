// Tensors of the CPU over the memory of a device's tensors, which the kernels of the CPU read and write, and back.
#include "operators.h"

#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace vdev {
namespace {

void release_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

void nothing(void*) {}

// A late task reads what the address holds when it runs, as a GPU does: it does not keep the block.
c10::DataPtr cpu_pointer(const c10::Storage& storage, Owning owning) {
  auto* data = storage.mutable_data();
  if (owning == Owning::no) {
    return {data, data, &nothing, c10::kCPU};
  }
  auto* kept = storage.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(kept);
  return {data, kept, &release_storage, c10::kCPU};
}

at::Tensor over(const c10::Storage& storage, const at::Tensor& shape, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), shape.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(shape.storage_offset());
  impl->set_sizes_and_strides(shape.sizes(), shape.strides());
  if (shape.is_conj()) {
    tensor._set_conj(true);
  }
  if (shape.is_neg()) {
    tensor._set_neg(true);
  }
  return tensor;
}

} // namespace

at::Tensor Aliases::on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kVdev) {
    return tensor;
  }
  auto& alias = aliases_[tensor.unsafeGetTensorImpl()];
  if (alias.defined()) {
    return alias;
  }
  const auto& storage = tensor.storage();
  auto& on_cpu = cpu_storages_[storage.unsafeGetStorageImpl()];
  if (!on_cpu) {
    on_cpu = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), cpu_pointer(storage, owning_),
                          c10::GetCPUAllocator(), /*resizable=*/true);
    storages_[on_cpu.unsafeGetStorageImpl()] = storage;
  }
  alias = over(on_cpu, tensor, c10::DispatchKey::CPU);
  originals_[alias.unsafeGetTensorImpl()] = tensor;
  return alias;
}

c10::Storage Aliases::storage_on_device(const c10::Storage& storage) {
  auto& known = storages_[storage.unsafeGetStorageImpl()];
  if (known) {
    return known;
  }
  const c10::DeviceGuard guard(device_);
  const auto bytes = storage.nbytes();
  at::DataPtr data;
  if (delayed()) { // the block comes from the pool, so that it goes back there
    data = allocator()->allocate(bytes);
    if (bytes > 0) {
      std::memcpy(data.get(), storage.data(), bytes);
    }
  } else {
    data = adopt(storage.unsafeGetStorageImpl()->set_data_ptr({}), bytes, device_.index());
  }
  known = c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), allocator(), /*resizable=*/true);
  if (!delayed()) { // whoever holds the storage of the kernel goes on to see the same memory
    storage.unsafeGetStorageImpl()->set_data_ptr(cpu_pointer(known, Owning::yes));
  }
  return known;
}

at::Tensor Aliases::on_device(const at::Tensor& result) {
  if (!result.defined() || result.device().type() == kVdev) {
    return result;
  }
  const auto original = originals_.find(result.unsafeGetTensorImpl());
  if (original != originals_.end()) {
    return original->second;
  }
  TORCH_CHECK(result.layout() == at::kStrided && !result.is_quantized() && result.device().is_cpu(),
              "vdev holds dense tensors only; a kernel of the CPU made one of ", result.layout(), " on ",
              result.device());
  return over(storage_on_device(result.storage()), result, c10::DispatchKey::PrivateUse1);
}

void Aliases::take_over_shape(const at::Tensor& alias) {
  const auto found = originals_.find(alias.unsafeGetTensorImpl());
  if (found == originals_.end()) {
    return;
  }
  auto* original = found->second.unsafeGetTensorImpl();
  const auto& storage = found->second.storage();
  if (alias.storage().unsafeGetStorageImpl()->data() != storage.data()) { // a kernel made room for its result
    const auto bytes = alias.storage().nbytes();
    auto data = adopt(alias.storage().unsafeGetStorageImpl()->set_data_ptr({}), bytes, device_.index());
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  if (original->sizes() != alias.sizes() || original->strides() != alias.strides()) {
    original->set_sizes_and_strides(alias.sizes(), alias.strides());
  }
}

c10::IValue with_tensors(const c10::IValue& value, const OnTensor& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const auto& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look) {
  if (!value.isTensor() && !value.isTensorList() && !value.isOptionalTensorList()) {
    return;
  }
  with_tensors(value, [&look](const at::Tensor& tensor) {
    if (tensor.defined()) {
      look(tensor);
    }
    return tensor;
  });
}

KernelScope::KernelScope()
    : no_modes(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) |
               c10::autocast_dispatch_keyset) {
  // A thread that was there before torch.set_num_threads has the number of before, and would sum in other pieces.
  at::init_num_threads();
}

} // namespace vdev
