#include "pyclient/hex_keys.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pegaflow::py_arguments {
namespace {

namespace py = pybind11;

constexpr std::size_t kKeyBytes = 32;
constexpr std::size_t kDigits = 2 * kKeyBytes;

/// Loops of a fixed length without branches, which compilers turn into vector instructions: this
/// runs for 8,192 keys of one lookup.
bool decode(const unsigned char* text, unsigned char* key) {
  std::array<std::uint8_t, kDigits> digits;
  std::uint8_t bad = 0;
  for (std::size_t i = 0; i < kDigits; ++i) {
    const std::uint8_t letter = text[i];
    const auto number = static_cast<std::uint8_t>(letter - '0');
    const auto small = static_cast<std::uint8_t>((letter | 0x20) - 'a');
    const auto is_number = static_cast<std::uint8_t>(number < 10 ? 0xff : 0);
    const auto is_small = static_cast<std::uint8_t>(small < 6 ? 0xff : 0);
    digits[i] = static_cast<std::uint8_t>((number & is_number) | ((small + 10) & is_small));
    bad |= static_cast<std::uint8_t>(~(is_number | is_small));
  }
  for (std::size_t i = 0; i < kKeyBytes; ++i) {
    key[i] = static_cast<std::uint8_t>(digits[2 * i] << 4 | digits[2 * i + 1]);
  }
  return bad == 0;
}

}  // namespace

py::object pack_hex_keys(const py::object& digests) {
  const auto all = py::reinterpret_steal<py::object>(
      PySequence_Fast(digests.ptr(), "no sequence of hexadecimal digests"));
  if (!all) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    return py::none();
  }
  const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(all.ptr()));
  PyObject* const* items = PySequence_Fast_ITEMS(all.ptr());
  auto packed = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kKeyBytes)));
  if (!packed) throw py::error_already_set();
  auto* key = reinterpret_cast<unsigned char*>(PyBytes_AS_STRING(packed.ptr()));
  for (std::size_t i = 0; i < count; ++i, key += kKeyBytes) {
    PyObject* digest = items[i];
    if (!PyUnicode_Check(digest) || !PyUnicode_IS_ASCII(digest) ||
        PyUnicode_GET_LENGTH(digest) != static_cast<Py_ssize_t>(kDigits)) {
      return py::none();
    }
    if (!decode(PyUnicode_1BYTE_DATA(digest), key)) return py::none();
  }
  return packed;
}

}  // namespace pegaflow::py_arguments
