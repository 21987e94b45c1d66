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
set(problem "")
if(cuda_major LESS 13)
  set(problem "the CUDA compiler is of ${CMAKE_CUDA_COMPILER_VERSION}, and te_jax needs CUDA 13, as jax[cuda13] does")
elseif(NOT CMAKE_CUDA_ARCHITECTURES MATCHES "^(;?(9|1[0-9])[0-9][af]?(-real|-virtual)?)+$")
  set(problem "CMAKE_CUDA_ARCHITECTURES is '${CMAKE_CUDA_ARCHITECTURES}', and the kernels use instructions of 90 and later: \
leave it out")
elseif(missing)
  list(JOIN missing ", " missing)
  set(problem "not found: ${missing}. Install the CUDA toolkit's cuBLAS development files, or: \
pip install nvidia-cuda-runtime nvidia-cublas")
endif()
if(problem AND TE_JAX_CUDA STREQUAL "ON")
  message(FATAL_ERROR "TE_JAX_CUDA=ON, but ${problem}")
elseif(problem)
  message(WARNING "te_jax: building the CPU extension only: ${problem}")
else()
  # Matrix products use instructions that only 9.0 has. The other kernels run there and, from PTX, which the driver
  # compiles, on later GPUs.
  set(product_architectures 90a-real)
  file(GLOB cuda_kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda_ext/*/*.cu)
  list(REVERSE cuda_kernels)  # those that compile longest come late in the alphabet
  set(product_kernels ${cuda_kernels})
  list(FILTER product_kernels INCLUDE REGEX "gemm/[^/]*$")
  list(REMOVE_ITEM cuda_kernels ${product_kernels})
  add_library(te_jax_products OBJECT ${product_kernels})
  set_target_properties(te_jax_products PROPERTIES CUDA_ARCHITECTURES "${product_architectures}"
                                                   POSITION_INDEPENDENT_CODE ON)
  te_jax_extension(_te_cuda cuda_ext/module_cuda.cc ${handlers} ${cuda_kernels})
  foreach(target te_jax_products _te_cuda)
    # As with XLA's own kernels, the runtime is a shared library that te_jax.native finds before it loads this module.
    set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY None CUDA_VISIBILITY_PRESET hidden)
    target_include_directories(${target} PRIVATE cuda_ext)
    target_include_directories(${target} SYSTEM PRIVATE ${cuda_runtime_h_DIRECTORY} ${cublasLt_h_DIRECTORY})
    target_compile_definitions(${target} PRIVATE TE_JAX_CUDA)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
    if(TE_JAX_LINE_INFO)
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>)
    endif()
  endforeach()
  if(TE_JAX_ASSEMBLE_PTX)
    target_compile_options(_te_cuda PRIVATE
                           "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_90,code=sm_120>")
  endif()
  target_link_libraries(_te_cuda PRIVATE te_jax_products ${cudart_LIBRARY} ${cublasLt_LIBRARY})
  list(JOIN CMAKE_CUDA_ARCHITECTURES ", " architectures)  # definitions hold no semicolon
  target_compile_definitions(_te_cuda PRIVATE TE_JAX_CUDA_ARCHITECTURES="${architectures}"
                                              TE_JAX_CUDA_PRODUCT_ARCHITECTURES="${product_architectures}")
  message(STATUS "te_jax: compiling CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${architectures} (products: ${product_architectures}), "
                 "${cublasLt_LIBRARY}")
endif()
