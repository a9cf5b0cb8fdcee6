#include "pyclient/py_error.h"

#include <array>

namespace pegaflow::py_error {
namespace {

namespace py = pybind11;

/// Kept for the life of the process, as the interpreter keeps extension modules.
std::array<PyObject*, kErrcCount> g_classes{};

struct ClassOf {
  Errc code;
  const char* name;
  PyObject* also;  ///< The builtin base class, for callers that do not know PegaFlow's classes.
  const char* doc;
};

}  // namespace

void add_exceptions(py::module_& module) {
  const auto make = [&](const char* name, const char* doc, py::tuple bases) {
    const std::string full = std::string("pegaflow._native.") + name;
    PyObject* const made = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
    if (made == nullptr) throw py::error_already_set();
    module.add_object(name, py::reinterpret_borrow<py::object>(made));
    return made;
  };
  const py::object base = py::reinterpret_steal<py::object>(make(
      "PegaFlowError", "An operation of PegaFlow failed; str() has the operation and the reason.",
      py::make_tuple(py::handle(PyExc_RuntimeError))));
  const ClassOf classes[] = {
      {Errc::kInvalidArgument, "InvalidArgument", PyExc_ValueError,
       "The call is invalid; the same call fails again."},
      {Errc::kBusy, "Busy", nullptr, "A queue or a limit is full; try later."},
      {Errc::kOutOfCapacity, "OutOfCapacity", nullptr, "Nothing can be evicted."},
      {Errc::kGone, "Gone", nullptr, "Revoked, aborted, or from another incarnation; start over."},
      {Errc::kTimeout, "Timeout", PyExc_TimeoutError, "No response before the deadline."},
      {Errc::kCancelled, "Cancelled", nullptr, "The caller withdrew."},
      {Errc::kPeerLost, "PeerLost", PyExc_ConnectionError, "There is no connection to a server."},
      {Errc::kRefused, "Refused", nullptr, "Version, layout or permission; fix the configuration."},
      {Errc::kCorrupt, "Corrupt", nullptr, "Bytes differ from those that were written."},
      {Errc::kIo, "IoError", PyExc_OSError, "A device or the kernel failed."},
      {Errc::kInternal, "Internal", nullptr, "A bug in PegaFlow or in a library."}};
  static_assert(std::size(classes) == kErrcCount);
  for (const ClassOf& entry : classes) {
    g_classes[static_cast<std::size_t>(entry.code)] =
        make(entry.name, entry.doc,
             entry.also == nullptr ? py::tuple(py::make_tuple(base))
                                   : py::tuple(py::make_tuple(base, py::handle(entry.also))));
  }
}

void raise(const Error& error) {
  PyErr_SetString(g_classes.at(static_cast<std::size_t>(error.code)), error.detail.c_str());
  throw py::error_already_set();
}

}  // namespace pegaflow::py_error
