#!/usr/bin/env bash
# run.sh BUILD_DIR LIBDIR CC: installs a build to a temporary prefix, then builds and runs the
# consumer with find_package and with pkg-config, and compiles every public header alone.
set -euo pipefail
build=$1 libdir=$2 cc=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix

cmake --install "$build" --prefix "$prefix" >"$work/install.log"
export LD_LIBRARY_PATH=$prefix/$libdir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

echo "== find_package"
cmake -S "$here" -B "$work/build" -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$prefix" \
  >"$work/configure.log"
cmake --build "$work/build" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
"$work/build/consumer"

echo "== pkg-config"
export PKG_CONFIG_PATH=$prefix/$libdir/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
# Word splitting is wanted: pkg-config prints several flags.
# shellcheck disable=SC2046
"$cc" -std=c11 "$here/consumer.c" -o "$work/consumer" $(pkg-config --cflags --libs kvring)
"$work/consumer"

echo "== headers alone, as C and as C++"
for header in "$prefix"/include/kvring/*.h; do
  for language in c c++; do
    printf '#include "kvring/%s"\n' "${header##*/}" |
      "$cc" -x "$language" -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I"$prefix/include" -
  done
done

if [ -x "$prefix/bin/kvring" ]; then
  echo "== installed tool"
  "$prefix/bin/kvring" --help >/dev/null
fi
