// Random numbers: a generator a device, each drawing with a generator of the CPU of its own.
#include "vdev.h"

#include <ATen/CPUGeneratorImpl.h>

namespace vdev {
namespace {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator drawing = at::detail::createCPUGenerator())
      : GeneratorImpl({kVdev, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        drawing(std::move(drawing)) {}

  void set_current_seed(uint64_t seed) override { drawing.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { drawing.set_offset(offset); }
  uint64_t get_offset() const override { return drawing.get_offset(); }
  uint64_t current_seed() const override { return drawing.current_seed(); }
  uint64_t seed() override { return drawing.seed(); }
  void set_state(const c10::TensorImpl& state) override { drawing.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawing.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), drawing.clone()); }

  at::Generator drawing;
};

} // namespace

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      made->push_back(new_generator(i));
    }
    return made;
  }();
  TORCH_CHECK(index >= 0 && size_t(index) < generators->size(), "vdev error: invalid device ordinal: ", int(index));
  return (*generators)[index];
}

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(index);
}

at::Generator drawn_on_cpu(const std::optional<at::Generator>& given, c10::Device device) {
  const auto& generator = given && given->defined() ? *given : default_generator(device.index());
  TORCH_CHECK(generator.device().type() == kVdev, "Expected a 'vdev' device type for generator but found '",
              generator.device().type(), "'");
  TORCH_CHECK(generator.device() == device, "Expected a generator of ", device, " but found one of ",
              generator.device());
  return generator.get<Generator>()->drawing;
}

} // namespace vdev
