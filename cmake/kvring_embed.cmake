# kvr_embed_kernels(OUT FOLDER): one generated C file per .cl and .h file of FOLDER, holding
#   const char kvr_src_NAME[]       the file, NUL terminated; '.' of the file name becomes '_'
#   const size_t kvr_src_NAME_len   its length without the NUL
function(kvr_embed_kernels out folder)
  file(GLOB inputs CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cl
       ${PROJECT_SOURCE_DIR}/${folder}/*.h)
  foreach(input ${inputs})
    get_filename_component(name ${input} NAME)
    string(REPLACE "." "_" name ${name})
    set(output ${PROJECT_BINARY_DIR}/kernels/${name}.c)
    add_custom_command(OUTPUT ${output} VERBATIM
      COMMAND ${CMAKE_COMMAND} -DIN=${input} -DOUT=${output} -DSYM=kvr_src_${name}
              -P ${PROJECT_SOURCE_DIR}/cmake/embed_file.cmake
      DEPENDS ${input} ${PROJECT_SOURCE_DIR}/cmake/embed_file.cmake
      COMMENT "Embedding ${name}")
    list(APPEND outputs ${output})
  endforeach()
  set(${out} ${outputs} PARENT_SCOPE)
endfunction()
