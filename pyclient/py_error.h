#pragma once
/// \file
/// Python exceptions for PegaFlow's errors: one class for each reaction of the caller.

#include <pybind11/pybind11.h>

#include "base/error.h"

namespace pegaflow::py_error {

/// Adds PegaFlowError and its subclasses to the module. With the GIL.
void add_exceptions(pybind11::module_& module);

/// Throws the Python exception of the error's code. With the GIL.
[[noreturn]] void raise(const Error& error);

/// Returns the value or throws the exception. With the GIL.
template <typename T>
T value_or_raise(Result<T>&& result) {
  if (!result) raise(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

}  // namespace pegaflow::py_error
