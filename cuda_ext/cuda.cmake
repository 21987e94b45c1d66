# The CUDA extension. Headers and libraries come from the toolkit of the compiler where it has them, otherwise from
# NVIDIA's wheels in this Python environment (build_backend.py asks for those that the toolkit lacks).
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

file(GLOB wheel_roots "${nvidia_root}/cu[0-9]*" "${nvidia_root}/cuda_runtime" "${nvidia_root}/cublas")
set(cuda_hints ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
foreach(directory IN LISTS CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES)
  get_filename_component(root "${directory}" DIRECTORY)
  list(APPEND cuda_hints "${root}")
endforeach()
list(APPEND cuda_hints ${wheel_roots})

# Wheels carry only the versioned name, lib….so.13; toolkits have both.
string(REGEX MATCH "^[0-9]+" cuda_major "${CMAKE_CUDA_COMPILER_VERSION}")
foreach(library cudart cublasLt)
  find_library(${library}_LIBRARY NAMES lib${library}.so.${cuda_major} lib${library}.so HINTS ${cuda_hints}
               PATH_SUFFIXES lib lib64 NO_DEFAULT_PATH)
  find_library(${library}_LIBRARY NAMES lib${library}.so.${cuda_major} lib${library}.so)
endforeach()
foreach(header cuda_runtime.h cublasLt.h)
  string(MAKE_C_IDENTIFIER "${header}_DIRECTORY" variable)
  find_path(${variable} ${header} HINTS ${cuda_hints} PATH_SUFFIXES include NO_DEFAULT_PATH)
  find_path(${variable} ${header})
endforeach()

set(missing "")
foreach(variable cudart_LIBRARY cublasLt_LIBRARY cuda_runtime_h_DIRECTORY cublasLt_h_DIRECTORY)
  if(NOT ${variable})
    list(APPEND missing ${variable})
  endif()
endforeach()
if(missing AND TE_JAX_CUDA STREQUAL "ON")
  message(FATAL_ERROR "TE_JAX_CUDA=ON, but not found: ${missing}. Install the CUDA toolkit's cuBLAS development "
                      "files, or: pip install nvidia-cuda-runtime nvidia-cublas")
elseif(missing)
  message(WARNING "te_jax: a CUDA compiler, but not ${missing}: building the CPU extension only. "
                  "pip install nvidia-cuda-runtime nvidia-cublas")
else()
  file(GLOB cuda_kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda_ext/*/*.cu)
  list(REVERSE cuda_kernels)  # those that compile longest come late in the alphabet
  te_jax_extension(_te_cuda cuda_ext/module_cuda.cc ${handlers} ${cuda_kernels})
  # As with XLA's own kernels, the runtime is a shared library that te_jax.native finds before it loads this module.
  set_target_properties(_te_cuda PROPERTIES CUDA_RUNTIME_LIBRARY None CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(_te_cuda SYSTEM PRIVATE ${cuda_runtime_h_DIRECTORY} ${cublasLt_h_DIRECTORY})
  target_link_libraries(_te_cuda PRIVATE ${cudart_LIBRARY} ${cublasLt_LIBRARY})
  target_compile_definitions(_te_cuda PRIVATE TE_JAX_CUDA TE_JAX_CUDA_ARCHITECTURES="${CMAKE_CUDA_ARCHITECTURES}")
  target_compile_options(_te_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo>)
  message(STATUS "te_jax: CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}, ${cublasLt_LIBRARY}")
endif()
