#!/usr/bin/env bash
# run.sh [SECONDS]: builds the fuzzers with clang in build-fuzz and runs each for so long (default 60)
# from its corpus. Control: a bug planted in a copy of each must be found. Exit 77: no libFuzzer here.
# Inputs that broke something are kept in build-fuzz/findings; put them into the corpus once fixed.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-60}

try=$(mktemp -d)
trap 'rm -rf "$try"' EXIT
echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { (void)d; return (int)(n - n); }' >"$try/t.c"
if ! clang -fsanitize=fuzzer,address "$try/t.c" -o "$try/t" 2>"$try/why"; then
  echo "SKIPPED: clang cannot link libFuzzer (Debian: apt-get install clang libclang-rt-14-dev)"
  cat "$try/why"
  exit 77
fi

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz --parallel 2 --target fuzzers
mkdir -p build-fuzz/findings

fuzz() { # PROGRAM CORPUS SECONDS: exit code of the fuzzer
  local work=$try/$1
  mkdir -p "$work"
  "build-fuzz/tests/$1" -max_total_time="$3" -max_len=2048 -timeout=10 -rss_limit_mb=2048 \
    -dict="tests/fuzz/$2.dict" -artifact_prefix=build-fuzz/findings/"$1"- -print_final_stats=1 "$work" \
    "tests/fuzz/corpus/$2" >"$try/log" 2>&1
}

failed=0
for source in tests/fuzz/fuzz_*.c; do
  name=$(basename "$source" .c)
  corpus=${name#fuzz_}
  if fuzz "$name" "$corpus" "$seconds"; then
    echo "$name: nothing found, $(grep -o 'number_of_executed_units: *[0-9]*' "$try/log")"
  else
    echo "$name: FOUND SOMETHING"
    tail -n 60 "$try/log"
    failed=1
  fi
  start=$SECONDS
  if fuzz "${name}_control" "$corpus" 60; then
    echo "${name}_control: the planted bug was not found in 60 s"
    failed=1
  else
    grep -q 'ERROR: AddressSanitizer' "$try/log" || { tail -n 60 "$try/log"; failed=1; }
    echo "${name}_control: the planted bug was found in $((SECONDS - start)) s"
    rm -f build-fuzz/findings/"${name}"_control-*
  fi
done
exit $failed
