# cmake -DIN=FILE -DOUT=FILE.c -DSYM=NAME -P embed_file.cmake
# Writes the bytes of IN as a C array. Bytes rather than a string literal: C11 guarantees literals
# of 4095 characters only, and no character of the source needs escaping.
file(READ "${IN}" bytes HEX)
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE "${OUT}" "/* Generated from a kernel source; do not edit. */
#include <stddef.h>
extern const char ${SYM}[];
extern const size_t ${SYM}_len;
const char ${SYM}[] = {
${bytes}0x00};
const size_t ${SYM}_len = sizeof ${SYM} - 1;
")
