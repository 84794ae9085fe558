# Language, warnings and helpers shared by all targets.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_C_FLAGS_RELEASE "-O2" CACHE STRING "Flags of release builds")

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_compile_definitions(_POSIX_C_SOURCE=200809L KVR_VERSION="${PROJECT_VERSION}")
add_compile_options(-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wstrict-prototypes
                    -Wmissing-prototypes -Wvla -Wundef -Wdouble-promotion)
if(KVR_WERROR)
  add_compile_options(-Werror)
endif()
if(KVR_SANITIZE)
  add_compile_options(-fsanitize=${KVR_SANITIZE} -fno-sanitize-recover=all
                      -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${KVR_SANITIZE})
endif()

include(GNUInstallDirs)

# kvr_sources(OUT FOLDER SUB...): the C files of FOLDER/SUB, kept up to date by the build.
function(kvr_sources out folder)
  set(globs ${ARGN})
  list(TRANSFORM globs REPLACE "(.+)" "${PROJECT_SOURCE_DIR}/${folder}/\\1/*.c")
  file(GLOB files CONFIGURE_DEPENDS ${globs})
  set(${out} ${files} PARENT_SCOPE)
endfunction()

# kvr_public_library(TARGET): what a library made of the object targets offers to its users.
function(kvr_public_library target)
  target_include_directories(${target} INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  # OpenCL is public: kvring/opencl.h includes its headers.
  target_link_libraries(${target} PUBLIC OpenCL::OpenCL PRIVATE PkgConfig::CJSON m)
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE C VERSION ${PROJECT_VERSION}
                        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endfunction()
