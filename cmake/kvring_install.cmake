# Installs the library, the tool, the headers, the CMake package and the pkg-config file.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvring)

install(TARGETS kvring EXPORT kvring_targets)
if(TARGET kvring_cli)
  install(TARGETS kvring_cli)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/kvring TYPE INCLUDE)
install(EXPORT kvring_targets NAMESPACE kvring:: FILE kvring-targets.cmake
        DESTINATION ${package_dir})

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/kvring-config.cmake.in ${PROJECT_BINARY_DIR}/kvring-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvring-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvring-config.cmake
              ${PROJECT_BINARY_DIR}/kvring-config-version.cmake DESTINATION ${package_dir})

# A static archive does not know what it needs: name it for plain `pkg-config --libs`.
set(pc_requires "OpenCL")
set(pc_libs "")
if(NOT BUILD_SHARED_LIBS)
  set(pc_requires "OpenCL, libcjson")
  set(pc_libs " -lm")
endif()
# Found from where the file lies, so that an installed tree may be moved.
set(pc_dir ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_prefix ${pc_dir} ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/kvring.pc.in ${PROJECT_BINARY_DIR}/kvring.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kvring.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
